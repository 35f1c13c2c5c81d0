"""Waiting for a peer that may die meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ipc.channel import TypedReceiver
from ipc.running_time import RunningTime
from procs.hub import Hub
from procs.runtime import Runtime
from ssd_pipe.errors import PeerLost

PEER_POLL = 0.1  # seconds between looks at the peers
STUCK = 120.0  # seconds one wait may take

T = TypeVar("T")


class Waiter:
    """The scheduler's waits: each ends with the message, with the stop flag, or with PeerLost."""

    def __init__(self, runtime: Runtime, hub: Hub) -> None:
        self._runtime = runtime
        self._hub = hub
        self._clock = RunningTime(PEER_POLL)

    def now(self) -> float:
        """Seconds of a clock for waits; to be read whenever one begins and in its every turn,
        PEER_POLL at most: a pause of the whole machine is nobody's delay."""
        return self._clock.read()

    def message(
        self,
        receiver: TypedReceiver[T],
        peer: str,
        what: str,
        done: Callable[[T], bool],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> T | None:
        """Messages until ``done`` likes one; None when told to stop.

        ``meanwhile`` is done whenever the receiver wakes up without one.

        Raises PeerLost if a process of the group is gone, or if ``what`` does not come in time
        from ``peer``.
        """
        begun: float | None = None
        while not self._runtime.stopping.is_set():
            message = receiver.recv(PEER_POLL)
            self._runtime.alive()
            if message is not None:
                if done(message):
                    return message
                continue
            meanwhile()
            self._hub.raise_lost()
            now = self.now()
            begun = now if begun is None else begun
            if now - begun > STUCK:
                raise PeerLost(f"{peer}: no {what} within {STUCK:.0f} s", peer)
        return None

    def absence(self, name: str) -> str:
        """Why a process that the group can do without is not there, empty while it is."""
        return self._hub.absence(name)

    def goes_on(self, started: float) -> bool:
        """Whether a wait begun at ``started`` (see ``now``) is to go on. Raises PeerLost."""
        self._runtime.alive()
        self._hub.raise_lost()
        return not self._runtime.stopping.is_set() and self.now() - started < STUCK
