"""Doorbell: wakes a sleeping process, and fits any poller."""

from __future__ import annotations

import contextlib
import os
import select
import stat
from pathlib import Path

from ipc.errors import ResourceError

_DRAIN = 256  # bytes; rings are few, and a long buffer costs more than a second read


def default_spin_us() -> int:
    """Microseconds worth spinning before sleeping: none where cores are scarce, about the longest
    step where every process has several of its own."""
    cores = len(os.sched_getaffinity(0))
    return 0 if cores <= 2 else 50 if cores < 12 else 20_000


class Doorbell:
    """A named pipe that both sides open; it is made by whoever comes first.

    Any number of processes ring, one listens. Rings coalesce: after ``wait`` returned True, look
    at everything the bell stands for, then wait again.
    """

    def __init__(self, path: Path) -> None:
        """Raises ResourceError if the path is taken by something else or cannot be made."""
        self.path = path
        try:
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # Opened for both directions: never blocks, and no peer's exit makes it readable.
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ResourceError(f"{path}: {error.strerror}") from None
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise ResourceError(f"{path}: not a doorbell")
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def ring(self) -> None:
        """Wake the listener. Never blocks: a full pipe has rung. Safe in a signal handler."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._fd, b"\0")

    def drain(self) -> bool:
        """Take all rings so far; True if there were any."""
        rung = False
        try:
            while len(os.read(self._fd, _DRAIN)) == _DRAIN:
                rung = True
        except BlockingIOError:
            return rung
        return True

    def wait(self, timeout: float) -> bool:
        """Sleep until rung or ``timeout`` seconds passed; True if rung. Takes the rings.

        Also wakes, with False, when a descriptor given to ``also_watch`` is readable.
        """
        if timeout > 0:
            self._poll.poll(max(1, round(timeout * 1000)))
        return self.drain()

    def also_watch(self, fd: int) -> None:
        """Let ``wait`` end early when ``fd`` is readable too (a stop flag)."""
        self._poll.register(fd, select.POLLIN)

    def fileno(self) -> int:
        """Readable while a ring is waiting."""
        return self._fd

    def close(self) -> None:
        """Close this side; the pipe stays for the others. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
