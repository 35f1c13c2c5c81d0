"""One life of a group: its processes started, awaited, and watched until one of them is missed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from ipc.messages.client import StatusReply
from ipc.messages.hub import ProcessState
from ipc.running_time import RunningTime
from ssd_pipe.config import PipelineConfig
from ssd_pipe.group import TURN, Blame, ProcessGroup
from ssd_pipe.launch import Launcher
from ssd_pipe.relay import Sink
from ssd_pipe.solo import SoloProcesses, end_of
from ssd_pipe.status_probe import StatusProbe

READY_TURN = 0.25  # seconds between looks
READY_PROBE = 0.5  # seconds between questions to a ready pipeline
NOTE_EVERY = 15.0  # seconds between signs of life of a slow start


class Life(contextlib.AbstractContextManager["Life"]):
    """To be used by the supervising thread, once.

    Args:
        stopping: whether the group has been asked to stop, which ends both waits.

    Attributes:
        blame: what ended it; None while nothing has.
        degraded: what the group serves without and why; empty while it is whole.
        processes: as last told of by the group itself.
    """

    def __init__(
        self,
        config: PipelineConfig,
        group: ProcessGroup,
        launcher: Launcher,
        sink: Sink,
        endpoint: str,
        stopping: Callable[[], bool],
    ) -> None:
        self.blame: Blame | None = None
        self.degraded = ""
        self.processes: tuple[ProcessState, ...] = ()
        self._config = config
        self._group = group
        self._launcher = launcher
        self._sink = sink
        self._stopping = stopping
        self._ready_at = 0.0
        self._probe = StatusProbe(endpoint, TURN)

    def __exit__(self, *exception: object) -> None:
        self._probe.close()

    @property
    def served(self) -> float:
        """Seconds since the group became ready, 0 if it never did."""
        return time.monotonic() - self._ready_at if self._ready_at else 0.0

    def begin(self) -> bool:
        """Start every process, wait until all are ready; False if it failed or was stopped."""
        limit = self._config.run.ready_timeout
        for name in self._launcher.names:
            self._launcher.start(self._group, name)
        clock, last_note = RunningTime(TURN), 0.0
        while not self._stopping():
            self._group.turn(TURN)
            now = clock.read()
            if self._group.broken:
                self.blame = self._group.blame()
            elif reply := self._probe.poll(now):
                self.processes = reply.processes
                dead = (p for p in reply.processes if p.state == "dead")
                self.blame = next(map(end_of, dead), None)
            late = self._late()
            if not self.blame and not late:
                self._ready_at = time.monotonic()
                return True
            if not self.blame and now > limit:
                failure = f"{', '.join(late)}: not ready within {limit:g} s"
                self.blame = Blame(late[0] if len(late) == 1 else "", failure)
            if self.blame:
                return False
            if now - last_note > NOTE_EVERY:
                last_note = now
                self._sink.event("info", "still starting", waiting_for=", ".join(late))
        return False

    def serve(self) -> None:
        """Until the group has failed or is to stop."""
        self._probe.interval = READY_PROBE
        clock = RunningTime(READY_TURN)
        self._probe.restart()
        solo = SoloProcesses(self._config, self._group, self._launcher, self._sink, clock.now)
        while not self.blame and not self._stopping():
            self._group.turn(READY_TURN)
            now = clock.read()
            self.blame = self._look(solo, now) or solo.turn(now)

    def _look(self, solo: SoloProcesses, now: float) -> Blame | None:
        """What ends the group, None if nothing does. ``now`` is a time of the turns' clock."""
        if self._group.broken:
            cause = self._group.cause()
            blame = self._group.blame_for(cause)
            # Not of whom they miss: that process may be well.
            if all(map(solo.covers, self._group.exited)):
                return solo.lost(cause, blame.failure, now)
            return blame
        if reply := self._probe.poll(now):
            return self._take(reply, solo, now)
        limit = self._config.run.beat_timeout
        if now - self._probe.answered > limit:
            return Blame("frontend", f"frontend: no answer for {limit:g} s")
        return None

    def _take(self, reply: StatusReply, solo: SoloProcesses, now: float) -> Blame | None:
        for process in reply.processes:
            if process.state == "dead" and not solo.covers(process.name):
                return end_of(process)
        if reply.degraded and not self.degraded:
            self._sink.event("warning", "degraded", reason=reply.degraded)
        elif self.degraded and not reply.degraded:
            self._sink.event("info", "no longer degraded")
        self.degraded = reply.degraded
        return solo.look(reply.processes, now)

    def _late(self) -> list[str]:
        """Names of the processes that are not ready yet."""
        ready = {p.name for p in self.processes if p.state == "ready"}
        return [name for name in self._launcher.names if name not in ready]
