"""Fixtures of the whole suite."""

from __future__ import annotations

import signal
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
