from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ipc.segments import Segment, create_segment, open_segment
from ssd_pipe.errors import ResourceError


def test_both_sides_see_one_array(shm_dir: Path) -> None:
    a = create_segment(shm_dir / "s", 4096).view(np.float32)
    b = open_segment(shm_dir / "s", 4096).view(np.float32)
    assert not b.any()
    a[99] = 1.5
    assert b[99] == 1.5
    assert os.stat(shm_dir / "s").st_mode & 0o077 == 0


def test_space_is_reserved_at_once(shm_dir: Path) -> None:
    Segment.create(shm_dir / "s", 1 << 20)
    assert os.stat(shm_dir / "s").st_blocks * 512 >= 1 << 20
    with pytest.raises(ResourceError, match="not enough shared memory"):
        Segment.create(shm_dir / "t", 1 << 50)
    assert os.listdir(shm_dir) == ["s"]


def test_an_array_outlives_close(shm_dir: Path) -> None:
    segment = Segment.create(shm_dir / "s", 64)
    array = np.frombuffer(segment.map, np.int64)
    segment.close()
    array[:] = 7
    assert int(open_segment(shm_dir / "s", 64)[0]) == 7


def test_sizes_and_names_are_checked(shm_dir: Path) -> None:
    memory = create_segment(shm_dir / "s", 64)
    assert memory.shape == (64,)
    assert memory.flags.writeable
    with pytest.raises(ResourceError, match="expected 65"):
        open_segment(shm_dir / "s", 65)
    with pytest.raises(ResourceError, match="exists"):
        create_segment(shm_dir / "s", 64)
    with pytest.raises(ResourceError, match="at least one byte"):
        create_segment(shm_dir / "t", 0)
