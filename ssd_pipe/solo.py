"""Processes that are started again alone, while the rest of the group goes on serving."""

from __future__ import annotations

from collections.abc import Sequence

from ipc.messages.hub import ProcessState
from ssd_pipe.config import PipelineConfig
from ssd_pipe.group import Blame, ProcessGroup
from ssd_pipe.launch import Launcher
from ssd_pipe.relay import Sink
from ssd_pipe.restarts import RestartBudget, solo_roles


class SoloProcesses:
    """Those processes of one group that has just become ready. For the supervising thread."""

    def __init__(
        self,
        config: PipelineConfig,
        group: ProcessGroup,
        launcher: Launcher,
        sink: Sink,
        now: float,
    ) -> None:
        self._run = config.run
        self._group = group
        self._launcher = launcher
        self._sink = sink
        roles = solo_roles(config)
        names = [name for name in launcher.names if name.partition("-")[0] in roles]
        most, window = self._run.max_restarts, self._run.restart_window
        self._budgets = {name: RestartBudget(most, window) for name in names}
        self._ready_since = dict.fromkeys(names, now)
        self._started: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._unkillable: set[str] = set()

    def covers(self, name: str) -> bool:
        """Whether this process may go without taking the group with it."""
        return name in self._budgets

    def lost(self, name: str, failure: str, now: float) -> Blame | None:
        """A process has exited or hangs: end it and plan its return.

        Returns why the group cannot go on, None if it can. Without a draft it can for ever.
        """
        served = now - self._ready_since.pop(name, now)
        self._started.pop(name, None)
        gone = self._group.remove(name)
        (self._unkillable.discard if gone else self._unkillable.add)(name)
        wait = self._budgets[name].take(served) if gone else None
        if wait is not None:
            self._due[name] = now + wait
            self._sink.event("warning", "restarting", name=name, reason=failure, seconds=wait)
            return None
        spent = self._budgets[name].spent
        reason = f"{failure} (given up, restarts in a row: {spent})" if gone else failure
        self._sink.event("error", "given up", name=name, reason=reason)
        return None if name.startswith("draft") else Blame(name, reason)

    def look(self, processes: Sequence[ProcessState], now: float) -> Blame | None:
        """Take in what the hub says of them; returns as ``lost``."""
        pids = self._group.pids
        for process in processes:
            name = process.name
            if not self.covers(name) or process.pid != pids.get(name):
                continue  # of its predecessor
            if process.state == "ready":
                self._ready_since.setdefault(name, now)
                self._started.pop(name, None)
            elif (
                process.state == "dead"
                and name not in self._unkillable
                and (blame := self.lost(*end_of(process), now))
            ):
                return blame
        return None

    def turn(self, now: float) -> Blame | None:
        """Start what is due, give up on what does not become ready; returns as ``lost``."""
        for name, due in list(self._due.items()):
            if now >= due:
                del self._due[name]
                self._started[name] = now
                self._launcher.start(self._group, name)
        for name, started in list(self._started.items()):
            if now - started > self._run.ready_timeout:
                reason = f"{name}: not ready within {self._run.ready_timeout:g} s"
                if blame := self.lost(name, reason, now):
                    return blame
        return None


def end_of(process: ProcessState) -> Blame:
    """What is to be said of a process that the hub has given up."""
    return Blame(process.name, f"{process.name}: {process.detail or 'stopped answering'}")
