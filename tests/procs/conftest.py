from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.procs.group import Group
from tests.waiting import wait_for


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
