"""Fixtures of the whole suite."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would every program that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def stand_still(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass at once, as for a process that is paused with its machine."""
    clock, paused = time.monotonic, [0.0]

    def pause(seconds: float) -> None:
        paused[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock() + paused[0])
    return pause


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder of its own in /dev/shm, short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="t-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target of bytes and of a draft that often agrees with it; not to be changed."""
    from tests.models.tiny import perturbed  # imports torch
    from tests.pipelines import byte_model

    folder = tmp_path_factory.mktemp("pair")
    target = byte_model(folder, "target")
    return target, perturbed(target, folder / "draft", 0.1)


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
