"""The lock that tells whether a run is alive: shared by its processes, exclusive to its removers.

A lock counts only while its file is the one at the directory's path: directories are renamed away
to be removed, and another run of the same name may follow.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from pathlib import Path

LOCK = ".lock"
GONE = ".gone-"  # prefix of directories on their way out
SETTLE = 5.0  # seconds a creation or a removal by somebody else may take


def graveyard(base: Path) -> Path:
    """A fresh name for a directory to be removed under."""
    return base / f"{GONE}{secrets.token_hex(8)}"


def try_lock(fd: int, kind: int) -> bool:
    """Take the lock (LOCK_SH or LOCK_EX) if that needs no waiting. On failure none is held."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def held(fd: int) -> bool:
    """Whether some other descriptor holds the lock."""
    if try_lock(fd, fcntl.LOCK_EX):
        fcntl.flock(fd, fcntl.LOCK_UN)
        return False
    return True


def open_lock(path: Path, flags: int = 0) -> int | None:
    """Descriptor of a directory's lock file, None if it has none."""
    try:
        return os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_lock_of(fd: int, path: Path) -> bool:
    """Whether ``path`` is still the directory this lock was opened in."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path / LOCK))
    except OSError:
        return False


def remove(fd: int, path: Path) -> None:
    """Remove ``path``; the caller holds its lock ``fd`` exclusively."""
    if is_lock_of(fd, path):
        grave = graveyard(path.parent)
        with contextlib.suppress(FileNotFoundError):
            path.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)


def remove_if_dead(path: Path) -> bool:
    """Remove a directory that nobody holds; True if this call removed it."""
    # A lock file that was lost is made again: nothing is ever removed without holding its lock.
    fd = open_lock(path, os.O_CREAT)
    if fd is None:
        return False
    try:
        if not try_lock(fd, fcntl.LOCK_EX) or not is_lock_of(fd, path):
            return False
        remove(fd, path)
        return True
    finally:
        os.close(fd)


def await_removal(fd: int, path: Path) -> None:
    """Wait until somebody else, who holds the lock, has removed ``path``."""
    deadline = time.monotonic() + SETTLE
    while is_lock_of(fd, path) and time.monotonic() < deadline:
        time.sleep(0.001)
