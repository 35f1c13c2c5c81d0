"""One supervised process: its own process group, its output line by line, its end explained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

from ssd_pipe.last_words import LastWords

MAX_LINE = 64 * 1024
READ_SIZE = 64 * 1024
TAIL_LINES = 20


class LineBuffer:
    """Bytes in, complete lines out; a line longer than MAX_LINE comes in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Lines completed by ``data``; empty ``data`` (end of file) completes the last one."""
        *lines, rest = (self._rest + data).split(b"\n")
        if rest and (not data or len(rest) > MAX_LINE):
            lines.append(rest)
            rest = b""
        self._rest = rest
        return [line.decode(errors="replace").rstrip("\r") for line in lines]


class Child:
    """A child process, its exit watched through a pidfd.

    It leads a process group of its own, so that Ctrl-C at the terminal reaches the supervisor
    alone.

    Attributes:
        name: process name, as in the logs (``target-0``).
        pidfd: becomes readable when the process has exited.
        signalled: the last signal the supervisor sent it, None if it sent none.
        tail: the last lines it wrote to stderr.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.signalled: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            pass_fds=tuple(pass_fds),
        )
        self.pid = self.process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self._buffers: dict[int, tuple[str, LineBuffer]] = {}
        for stream, pipe in (("stdout", self.process.stdout), ("stderr", self.process.stderr)):
            os.set_blocking(_fileno(pipe), False)
            self._buffers[_fileno(pipe)] = (stream, LineBuffer())

    @property
    def pipes(self) -> list[int]:
        """Descriptors of its output that are still open."""
        return list(self._buffers)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def read(self, descriptor: int) -> list[tuple[str, str]]:
        """New (stream, line) pairs; at end of file the descriptor leaves ``pipes``."""
        stream, buffer = self._buffers[descriptor]
        try:
            data = os.read(descriptor, READ_SIZE)
        except BlockingIOError:
            return []
        if not data:
            del self._buffers[descriptor]
        lines = [line for line in buffer.feed(data) if line.strip()]
        if stream == "stderr":
            self.tail.extend(lines)
        return [(stream, line) for line in lines]

    def send(self, number: int) -> None:
        """Signal the process if it is still there."""
        if self.running:
            self.signalled = number
            self.process.send_signal(number)

    def close(self) -> None:
        """Reap it and close what was opened for it; the process must have exited."""
        self.process.wait()
        os.close(self.pidfd)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    @property
    def died_alone(self) -> bool:
        """Whether a signal that the supervisor did not send ended it."""
        code = self.process.poll()
        return code is not None and code < 0 and -code != self.signalled

    def explain(self) -> LastWords:
        """Why it ended: the signal, or what it said itself, or the exit status."""
        code = self.process.poll()
        if code is None:
            return LastWords("is still running")
        if code < 0:
            return LastWords(f"was killed by {_signal_name(-code)}")
        for line in reversed(self.tail):
            if words := LastWords.read(line):
                return words
        if code and self.tail:
            return LastWords(f"exited with status {code}: {self.tail[-1].strip()}")
        return LastWords(f"exited with status {code}")


def command_for(role: str, rank: int, run: str, shm_dir: str) -> list[str]:
    """Command line that starts one process of a run whose directory exists."""
    command = [sys.executable, "-m", "ssd_pipe", "run", role, "--run", run, "--rank", str(rank)]
    return [*command, "--set", f"run.shm_dir={json.dumps(shm_dir)}"]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _fileno(pipe: IO[bytes] | None) -> int:
    if pipe is None:
        raise ValueError("the process has no pipe")
    return pipe.fileno()
