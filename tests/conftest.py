"""Fixtures of the whole suite."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would every program that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder of its own in /dev/shm, short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="t-") as folder:
        yield Path(folder)


@pytest.fixture
def disk_dir() -> Iterator[Path]:
    """A folder that is not in memory, short enough for sockets; skips where there is none."""
    for place in ("/tmp", "/var/tmp", str(Path.home())):
        kind = subprocess.check_output(["stat", "-f", "-c", "%T", place], text=True).strip()
        if kind != "tmpfs":
            with tempfile.TemporaryDirectory(dir=place, prefix="t-") as folder:
                yield Path(folder)
            return
    pytest.skip("every folder here is in memory")
