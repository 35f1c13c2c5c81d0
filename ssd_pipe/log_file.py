"""A log file of bounded size: at its limit it becomes ``<process>.1.jsonl``, and a new one begins.

The file renamed before it is replaced, so a process keeps at most twice the limit.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from ssd_pipe.errors import ResourceError

FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
MODE = 0o600
ROTATED = ".1"


def rotated(path: Path) -> Path:
    """Where ``path`` goes when it is full."""
    return path.with_name(f"{path.stem}{ROTATED}{path.suffix}")


def process_of(path: Path) -> str:
    """The process whose log ``path`` is, the present one or the one before."""
    return path.stem.removesuffix(ROTATED)


class LogFile:
    """Lines appended to a file.

    Args:
        path: folders are made.
        limit: bytes it may have; 0 = no limit.

    Raises ResourceError if it cannot be opened.
    """

    def __init__(self, path: Path, limit: int = 0) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, FLAGS, MODE)
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            raise ResourceError(f"log file {path}: {error.strerror}") from None
        self._path = path
        self._limit = limit
        self._rotating = threading.Lock()

    def write(self, line: bytes) -> None:
        """Append; what cannot be written is lost."""
        if self._fd < 0:
            return
        if self._limit and self._size and self._size + len(line) > self._limit:
            self._rotate()
        self._size += len(line)
        # A full disk must not take the process down with it.
        with contextlib.suppress(OSError):
            os.write(self._fd, line)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _rotate(self) -> None:
        # Not waiting: another thread is at it, or this one, below a signal handler.
        if not self._rotating.acquire(blocking=False):
            return
        try:
            self._size = 0  # even if it fails: tried again a limit later, not at every line
            with contextlib.suppress(FileNotFoundError):
                self._path.rename(rotated(self._path))
            fresh = os.open(self._path, FLAGS, MODE)
            # The descriptor keeps its number, so that a thread that is writing hits an open one.
            os.dup2(fresh, self._fd, inheritable=False)
            os.close(fresh)
        except OSError:
            pass
        finally:
            self._rotating.release()
