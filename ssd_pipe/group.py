"""The processes of one pipeline as a group: output passed on, exits seen, ended in stages."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ipc.running_time import RunningTime
from ssd_pipe.children import Child
from ssd_pipe.relay import Sink

TURN = 0.05  # seconds between looks while something is about to happen
SLOW_TURN = 0.25  # seconds a turn may take where others keep the machine busy
BLAME_WINDOW = 1.0  # seconds in which the exits that follow a failure are collected
KILL_WAIT = 3.0
DRAIN_WAIT = 0.5


class Blame(NamedTuple):
    """The process that began a failure, and the failure in one line that names it.

    ``name`` is empty where no single process did.
    """

    name: str
    failure: str


class ProcessGroup:
    """Used by one thread; only ``wake`` may be called from elsewhere, signal handlers included."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._children: dict[str, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._clock = RunningTime(SLOW_TURN)  # read in every turn
        self._closed = False

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by process name."""
        return {name: child.pid for name, child in list(self._children.items())}

    @property
    def exited(self) -> list[str]:
        """Names of the processes that have exited."""
        return [name for name, child in self._children.items() if not child.running]

    @property
    def broken(self) -> bool:
        """Whether any process has exited."""
        return bool(self.exited)

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start a process that inherits ``pass_fds``. Raises OSError if the machine cannot."""
        child = Child(name, command, environment, pass_fds)
        self._children[name] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ)
        for pipe in child.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, child)
        self._sink.event("info", "started", name=name, pid=child.pid)

    def wake(self) -> None:
        """End a running ``turn`` early."""
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    def turn(self, timeout: float) -> None:
        """Wait for output, an exit or ``wake``; pass the output on."""
        for key, _ in self._selector.select(timeout):
            if key.fd == self._wake:
                os.eventfd_read(self._wake)
            elif key.data is None:
                self._selector.unregister(key.fd)  # a pidfd; exits are seen by polling
            else:
                child: Child = key.data
                for stream, line in child.read(key.fd):
                    self._sink.line(child.name, stream, line)
                if key.fd not in child.pipes:
                    self._selector.unregister(key.fd)
        self._clock.read()

    def blame(self) -> Blame:
        """What began the failure: see ``cause`` and ``blame_for``."""
        return self.blame_for(self.cause())

    def cause(self) -> str:
        """Name of the exited process that explains the failure best.

        Its peers leave within moments, some before it: those of them that a signal ended or that
        give a reason of their own explain more than those that only miss a peer.
        """
        until = self._clock.read() + BLAME_WINDOW
        exited: list[Child] = []
        while len(exited) < len(self._children) and self._clock.now < until:
            if any(child.died_alone for child in exited):
                break
            self.turn(TURN)
            for child in self._children.values():
                if not child.running and child not in exited:
                    exited.append(child)
        return min(exited, key=self._innocence).name

    def blame_for(self, name: str) -> Blame:
        """Why a process has exited; the blame is the peer's that it missed, dead or alive."""
        child = self._children[name]
        reason = child.explain().reason
        peer = self._missed_peer(child)
        return Blame(peer, reason) if peer else Blame(name, f"{name}: {reason}")

    def _innocence(self, child: Child) -> int:
        if child.died_alone:
            return 0
        if child.process.poll() == 0:
            return 3
        return 2 if self._missed_peer(child) else 1

    def _missed_peer(self, child: Child) -> str:
        """The other process of the group without which it could not go on, or ""."""
        peer = child.explain().peer
        return peer if peer != child.name and peer in self._children else ""

    def tear_down(
        self, stages: Sequence[Sequence[str]], grace: float, hurry: Callable[[], bool]
    ) -> None:
        """TERM stage by stage, each with its share of ``grace`` seconds, then KILL what is left.

        Args:
            stages: roles (a process name up to its "-") that are ended together, in order.
            grace: seconds until KILL, over all stages.
            hurry: looked at between turns; True ends the grace time.
        """
        begun = self._clock.read()
        for number, roles in enumerate(stages, 1):
            stage = self._of(roles)
            for child in stage:
                child.send(signal.SIGTERM)
            self._until_gone(stage, begun + grace * number / len(stages), hurry)
        everything = list(self._children.values())
        for child in everything:
            if child.running:
                self._sink.event("warning", "killing", name=child.name, pid=child.pid)
                child.send(signal.SIGKILL)
        self._until_gone(everything, self._clock.read() + KILL_WAIT)
        self._drain(everything)

    def kill(self, name: str) -> None:
        """End one process at once, if it is one of these and still runs."""
        child = self._children.get(name)
        if child is not None and child.running:
            self._sink.event("warning", "killing", name=name, pid=child.pid)
            child.send(signal.SIGKILL)

    def await_exit(
        self, roles: Sequence[str], seconds: float, hurry: Callable[[], bool] = bool
    ) -> None:
        """Give the processes of these roles time to end by themselves; ``hurry`` ends it."""
        self._until_gone(self._of(roles), self._clock.read() + seconds, hurry)

    def remove(self, name: str) -> bool:
        """KILL one process if it still runs, reap and forget it; False if it cannot be killed."""
        child = self._children[name]
        if child.running:
            self._sink.event("warning", "killing", name=name, pid=child.pid)
            child.send(signal.SIGKILL)
            self._until_gone([child], self._clock.read() + KILL_WAIT)
        if child.running:
            self._report_unkillable(child)
            return False
        self._drain([child])
        for fd in (child.pidfd, *child.pipes):
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
        child.close()
        del self._children[name]
        return True

    def clear(self) -> bool:
        """``remove`` everything; False if a process could not be killed."""
        gone = [self.remove(name) for name in list(self._children)]
        return all(gone)

    def close(self) -> None:
        """Reap everything; the object is of no more use."""
        self._closed = True
        for child in self._children.values():
            if child.running:
                self._report_unkillable(child)
            else:
                child.close()
        self._selector.close()
        os.close(self._wake)

    def _report_unkillable(self, child: Child) -> None:
        self._sink.event("error", "cannot be killed", name=child.name, pid=child.pid)

    def _of(self, roles: Sequence[str]) -> list[Child]:
        return [c for c in self._children.values() if c.name.partition("-")[0] in roles]

    def _until_gone(
        self, group: list[Child], deadline: float, hurry: Callable[[], bool] = bool
    ) -> None:
        while any(child.running for child in group) and self._clock.now < deadline:
            if hurry():
                return
            self.turn(TURN)

    def _drain(self, group: list[Child]) -> None:
        """Pass on what is left in the pipes; a grandchild may hold one open for ever."""
        until = self._clock.read() + DRAIN_WAIT
        while any(c.pipes for c in group) and self._clock.now < until:
            self.turn(TURN)
