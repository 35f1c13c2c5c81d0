"""Fixtures of the whole suite."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder of its own in /dev/shm, short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="t-") as folder:
        yield Path(folder)
