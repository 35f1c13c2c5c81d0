"""Recording steps, next to whatever may still be on a GPU's queue."""

from __future__ import annotations

from pathlib import Path

import structlog

from ipc.rundir import RunDir
from procs.liveness import StopFlag
from procs.profiling import StepProfiler
from procs.runtime import Runtime
from ssd_pipe.config import config_from_mapping


def test_the_queue_is_cleared_before_the_recording_ends(shm_dir: Path, tmp_path: Path) -> None:
    run = {"torch_profiler": 2, "log_dir": str(tmp_path)}
    config = config_from_mapping({"mode": "ar", "run": run})
    cleared: list[bool] = []
    with RunDir.create(shm_dir, "r") as rundir:
        runtime = Runtime("target", 0, config, rundir, structlog.get_logger(), StopFlag(), 1)
        (tmp_path / "r").mkdir(exist_ok=True)
        with StepProfiler(runtime, lambda: cleared.append(True)) as profiler:
            with profiler.step("verify 1"):
                pass
            assert not cleared
            with profiler.step("verify 2"):
                pass
            assert cleared == [True]
        assert cleared == [True]
