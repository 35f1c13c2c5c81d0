"""The ladder of transports between two processes with GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: torch.cuda.is_available() is false", allow_module_level=True)

from ssd_pipe.device_report import describe, probe_devices


def test_two_processes_of_one_gpu_use_cuda_ipc(shm_dir: Path) -> None:
    report = probe_devices(shm_dir, ("cuda:0", "cuda:0"))
    assert report.transport == "cuda-ipc"
    assert list(report.round_trips) == ["cuda-ipc", "shm"]
    assert report.rejected == {"nccl": "both processes compute on the same GPU"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_every_transport_works_between_two_gpus(shm_dir: Path) -> None:
    report = probe_devices(shm_dir, ("cuda:0", "cuda:1"))
    assert list(report.round_trips) == ["cuda-ipc", "nccl", "shm"]
    assert report.rejected == {}
    assert describe(shm_dir)["takes"] == "cuda-ipc"


def test_a_gpu_and_a_cpu_meet_in_host_memory(shm_dir: Path) -> None:
    report = probe_devices(shm_dir, ("cuda:0", "cpu"))
    assert report.transport == "shm"
    assert "no GPU" in report.rejected["cuda-ipc"]
