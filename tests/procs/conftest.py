from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.rundir import RunDir
from tests.procs.group import Group
from tests.procs.scheduler_process import Process
from tests.waiting import wait_for

Opened = Callable[..., Process]


@pytest.fixture
def open_process(shm_dir: Path) -> Iterator[Opened]:
    """Makes the process of a scheduler in a mode, "ar" by default."""
    with RunDir.create(shm_dir, "r") as rundir, contextlib.ExitStack() as stack:
        yield lambda mode="ar": Process(rundir, stack, mode)


@pytest.fixture
def make_group(tmp_path: Path) -> Iterator[Any]:
    groups: list[Group] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sp-") as shm_dir:

        def make(**run: Any) -> Group:
            groups.append(Group(tmp_path, Path(shm_dir), **run))
            return groups[-1]

        yield make
        for group in groups:
            for member in group.members.values():
                member.kill()
                member.communicate()
        # However the group ended, nothing is left of it.
        base = Path(shm_dir) / f"ssd-pipe-{os.getuid()}"
        wait_for(lambda: not base.exists() or os.listdir(base) == [])
