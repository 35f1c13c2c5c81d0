"""The ladder of transports between two processes' devices, on CPUs; tests/gpu has the GPUs."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import torch

from ipc.lockstep import Lockstep
from ipc.rundir import RunDir
from ipc.shm_channel import ShmChannel
from models.cuda.transports import climb
from ssd_pipe.device_report import probe_devices
from tests.models.sides import CPU, side, transports


def test_the_first_that_brings_every_byte_back_is_taken_by_both(shm_dir: Path) -> None:
    torch.set_num_threads(1)
    with RunDir.create(shm_dir, "r") as run:
        context = multiprocessing.get_context("spawn")
        other = context.Process(target=side, args=(str(shm_dir), False), daemon=True)
        other.start()
        link = Lockstep(ShmChannel.open(run, "there"), ShmChannel.open(run, "back"), first=True)
        link.together(timeout=60)
        report = climb(link, CPU, transports(run.path))
        other.join(30)
        assert other.exitcode == 0
        left = {name for name in os.listdir(run.path) if name.endswith(".pages")}
    assert report.transport == "shm"
    assert report.rejected == {
        "broken": "other side: no such cable",
        "bad-cable": "4096 bytes came back changed",
    }
    assert 0 < report.round_trips["shm"] < 1e6
    assert (shm_dir / "agreed").read_text() == "shm ['bad-cable', 'broken']"
    assert left == set()


def test_processes_without_a_gpu_meet_in_shared_memory(shm_dir: Path) -> None:
    report = probe_devices(shm_dir, ("cpu", "cpu"))
    assert report.transport == "shm"
    assert list(report.round_trips) == ["shm"]
    assert set(report.rejected) == {"cuda-ipc", "nccl"}
    assert all("no GPU: this process computes on cpu" in why for why in report.rejected.values())
    assert os.listdir(shm_dir / f"ssd-pipe-{os.getuid()}") == []
