"""One-way byte channel between two processes of one host: a ring and a doorbell."""

from __future__ import annotations

import time

from ipc.doorbell import Doorbell
from ipc.ring import Ring
from ipc.rundir import RunDir

DEFAULT_CAPACITY = 1 << 20  # bytes


class ShmChannel:
    """One process sends, one receives. Either may open it first; both give the same capacity."""

    def __init__(self, ring: Ring, bell: Doorbell, spin_us: int = 0) -> None:
        self._ring = ring
        self._bell = bell
        self._spin_ns = spin_us * 1000

    @classmethod
    def open(
        cls,
        rundir: RunDir,
        name: str,
        capacity: int = DEFAULT_CAPACITY,
        spin_us: int = 0,
        stop_fd: int = -1,
    ) -> ShmChannel:
        """Open the channel ``name`` of a run.

        Args:
            rundir: the run.
            name: the channel, for instance "scheduler-draft"; one sender and one receiver each.
            capacity: bytes in flight.
            spin_us: microseconds ``recv`` looks before it sleeps.
            stop_fd: a descriptor that makes ``recv`` return early when readable, -1 for none.

        Raises:
            ResourceError: shared memory is short, or the channel exists with another capacity.
        """
        bell = Doorbell(rundir.bell(name))
        if stop_fd >= 0:
            bell.also_watch(stop_fd)
        return cls(Ring.create_or_open(rundir.segment(name), capacity), bell, spin_us)

    def send(self, data: bytes | bytearray, timeout: float = 10.0) -> None:
        """Send one record. Raises PeerLost if there is no room in time (see Ring.send)."""
        self._ring.send(data, timeout)
        self._bell.ring()

    def recv(self, timeout: float) -> bytes | None:
        """The next record; None if none came within ``timeout`` seconds or the stop flag is up.

        A poller on ``fileno`` calls ``recv(0)`` until it returns None; that also resets the bell.
        """
        record = self._ring.recv()
        if record is not None:
            return record
        deadline = time.monotonic() + timeout
        if self._spin_ns and timeout > 0:
            spin_end = time.monotonic_ns() + min(self._spin_ns, int(timeout * 1e9))
            while self._ring.empty() and time.monotonic_ns() < spin_end:
                pass
        while True:
            # The bell is taken before the ring is read: a record sent after that rings again.
            rung = self._bell.wait(max(0.0, deadline - time.monotonic()))
            record = self._ring.recv()
            if record is not None or not rung or time.monotonic() >= deadline:
                return record

    def fileno(self) -> int:
        """Readable when a record may be waiting."""
        return self._bell.fileno()

    def waiting(self) -> bool:
        """Whether a record is there; cheaper than ``recv(0)`` where none is."""
        return not self._ring.empty()

    def also_watch(self, fd: int) -> None:
        """Let ``recv`` return early, with None, when ``fd`` is readable too."""
        self._bell.also_watch(fd)

    def close(self) -> None:
        """Close this side. Idempotent."""
        self._ring.close()
        self._bell.close()
