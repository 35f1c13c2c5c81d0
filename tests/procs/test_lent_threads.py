"""Threads and cores that a model process computes with, alone and beside the other one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from ipc.rundir import RunDir
from procs.liveness import StopFlag
from procs.placement import Threads
from procs.runtime import Runtime
from ssd_pipe.config_load import load
from ssd_pipe.threads import available_cores, process_cores, thread_count

CPU = torch.device("cpu")


@pytest.fixture
def restored() -> Iterator[list[int]]:
    """The cores of this process, which it has again afterwards, as torch its threads."""
    cores, threads = available_cores(), torch.get_num_threads()
    yield cores
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)
    torch.set_num_threads(threads)


def runtime(shm_dir: Path, settings: dict[str, Any], cores: list[int]) -> Runtime:
    config = load(None, settings | {"run.shm_dir": str(shm_dir)})
    count = thread_count(config, "target", len(cores))
    with RunDir.create(shm_dir) as rundir:
        made = Runtime("target", 0, config, rundir, structlog.get_logger(), StopFlag(), count)
    made.cores = cores
    return made


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_a_target_that_works_alone_has_the_drafts_cores(restored: list[int], shm_dir: Path) -> None:
    cores = restored[:2]
    made = runtime(shm_dir, {"mode": "ssd"}, cores)
    torch.set_num_threads(made.threads)
    threads = Threads(made, CPU)
    for _ in range(2):
        threads.use(True)
        assert torch.get_num_threads() == 2
        assert sorted(os.sched_getaffinity(0)) == cores
        threads.use(False)
        assert torch.get_num_threads() == 1
        assert sorted(os.sched_getaffinity(0)) == process_cores(made.config, "target", cores)


def test_nothing_changes_where_threads_are_set(restored: list[int], shm_dir: Path) -> None:
    made = runtime(shm_dir, {"mode": "ssd", "target.threads": 3}, [0, 1])
    torch.set_num_threads(3)
    threads = Threads(made, CPU)
    for alone in (True, False, True):
        threads.use(alone)
        assert torch.get_num_threads() == 3
        assert available_cores() == restored
