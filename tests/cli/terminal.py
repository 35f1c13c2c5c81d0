"""A command on a terminal of its own, seen and typed at as a user does."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator

from tests.pipelines import command

WAIT = 30.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """The program's end of a pseudo terminal; ``seen`` is everything it printed."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self.seen = ""
        self._fd = fd
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._looked = 0

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        """Interrupt, again every second, until ``text`` comes.

        A signal that comes just before input() waits is noticed with the next one only.
        """
        for _ in range(int(WAIT)):
            self.interrupt()
            if self._until(text, 1.0):
                return
        raise AssertionError(f"no {text!r} in {self.seen!r}")

    def until(self, text: str) -> str:
        """Wait for ``text`` after what was waited for before; returns what came up to it."""
        begin = self._looked
        assert self._until(text, WAIT), f"no {text!r} in {self.seen!r}"
        return self.seen[begin : self._looked]

    def _until(self, text: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (at := self.seen.find(text, self._looked)) < 0:
            if not self._read(max(0.0, deadline - time.monotonic())):
                return False
        self._looked = at + len(text)
        return True

    def end(self) -> int:
        """Wait for the program to end; returns its status."""
        while self._read(WAIT):
            pass
        return self.process.wait(WAIT)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._fd], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError as error:  # how Linux says that nobody has the other end open
            if error.errno != errno.EIO:
                raise
            return False
        self.seen += self._decoder.decode(data)
        return bool(data)


@contextlib.contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """``ssd-pipe`` on a terminal of 120 columns; killed at the end if it is still there."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": "120", "LINES": "50", "TERM": "xterm-256color"}
    without = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    process = subprocess.Popen(
        command(*arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**without, **size, **environment},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


def plain(text: str) -> str:
    """Without what only a terminal understands."""
    return ESCAPES.sub("", text).replace("\r\n", "\n")
