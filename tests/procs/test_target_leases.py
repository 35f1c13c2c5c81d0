"""The target's side of a lease: it follows its GPU to the end, and does not wait for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import structlog

from ipc import round_records as rr
from ipc.messages.target import Lease, RowLease, StepPlan, StepRow
from ipc.rundir import RunDir
from procs import target_leases
from procs.liveness import StopFlag
from procs.runtime import Runtime
from procs.target_leases import run_lease
from ssd_pipe.config import config_from_mapping
from ssd_pipe.errors import ResourceError

K, ROUNDS = 2, 3
PLAN = StepPlan(
    1, [StepRow(0, 0, [5], 0, True, [0])], lease=Lease(1, ROUNDS, 0, 0, 0, [RowLease(0, 20)])
)


class Gpu:
    """Stands for the verifier, its graph and the link: ``launch`` is what the GPU does then."""

    def __init__(self, launch: Callable[[rr.RoundRecords], None]) -> None:
        memory = np.zeros(rr.RoundRecords.size_bytes(1, K), np.uint8)
        self.records = rr.RoundRecords(memory, 1, K)
        self._launch = launch

    def launch(self) -> None:
        self._launch(self.records)

    def begin_lease(self, plan: StepPlan) -> Gpu:
        return self

    def end_lease(self) -> None: ...

    def set_clock(self) -> None: ...


def next_round(records: rr.RoundRecords) -> None:
    """The record of the round after those that there are."""
    number = int(records.records[..., rr.NUMBER].max()) + 1
    records.records[number % rr.ROUNDS, 0, rr.NUMBER] = number


@pytest.fixture
def run(shm_dir: Path) -> Any:
    def run_it(gpu: Gpu) -> Any:
        config = config_from_mapping({"mode": "ssd"})
        with RunDir.create(shm_dir, "r") as rundir:
            log = structlog.get_logger()
            runtime = Runtime("target", 0, config, rundir, log, StopFlag(), 1)
            return run_lease(runtime, cast(Any, gpu), cast(Any, gpu), PLAN)

    return run_it


def test_a_lease_is_run_to_its_end(run: Any) -> None:
    gpu = Gpu(next_round)
    assert run(gpu).rounds == ROUNDS
    assert not gpu.records.aborted


def test_a_gpu_that_ends_no_round_is_no_lost_peer(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_leases, "STUCK", 0.01)
    gpu = Gpu(lambda records: None)
    with pytest.raises(ResourceError, match="no leased round on the GPU ended"):
        run(gpu)
    assert gpu.records.aborted
