"""When a process should stop, and whether its main loop is still turning."""

from __future__ import annotations

import os
import select
import time

from ssd_pipe.errors import RequestError

BEAT = 0.25  # seconds between signs of life of an event loop, whatever else it does
SIGNALS = ("SIGTERM", "SIGINT")
"""Reasons of a StopFlag that mean an orderly end."""


def farewell(reason: str) -> RequestError:
    """What requests are told (503), wherever they are, when the pipeline ends.

    ``reason`` is a StopFlag's, or what has failed; empty for an orderly end.
    """
    orderly = not reason or reason in SIGNALS
    return RequestError(
        503, "the pipeline is stopping" if orderly else f"pipeline stopped: {reason}"
    )


class Stopping(Exception):
    """Raised where a process waits or loads when it has been asked to stop; not an error."""


class StopFlag:
    """Goes up once and stays up. Fits any poller; setting it is safe in a signal handler.

    Attributes:
        reason: why, empty until set; the first reason wins.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self, reason: str) -> None:
        """Raise the flag."""
        self.reason = self.reason or reason
        os.eventfd_write(self._fd, 1)

    def is_set(self) -> bool:
        return bool(self.reason)

    def fileno(self) -> int:
        """Readable from the moment the flag is up, for good."""
        return self._fd

    def wait(self, timeout: float) -> bool:
        """Sleep until the flag is up or ``timeout`` seconds passed; True if it is up."""
        return self.is_set() or bool(readable([self._fd], timeout))

    def check(self) -> None:
        """Raise Stopping if the flag is up."""
        if self.reason:
            raise Stopping(self.reason)


class Pulse:
    """Tells a heartbeat thread whether the main loop still turns.

    Exempt until ``begin``: loading a model takes as long as it takes.
    """

    def __init__(self, limit: float) -> None:
        """``limit``: seconds between two touches after which the main loop counts as stuck."""
        self.limit = limit
        self._exempt = True
        self._last = time.monotonic()

    def begin(self) -> None:
        """Loading is over: from now on ``touch`` is due."""
        self._last = time.monotonic()
        self._exempt = False

    def touch(self) -> None:
        """The main loop is alive. Costs a clock read."""
        self._last = time.monotonic()

    def beating(self) -> bool:
        return self._exempt or time.monotonic() - self._last < self.limit


class Wakeup:
    """Ends another thread's poll; rings coalesce until ``clear``."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def readable(fds: list[int], timeout: float) -> list[int]:
    """Those of ``fds`` that are readable, waiting up to ``timeout`` seconds for the first."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0, -(-timeout * 1000 // 1)))]
