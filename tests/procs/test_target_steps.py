"""A target with leave goes on by itself; without it, or told otherwise, it waits for a plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from ipc.channel import TypedReceiver, TypedSender
from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Ahead, RowAhead, SeqStart, StepPlan, StepResult, StepRow
from ipc.rundir import RunDir
from procs.liveness import StopFlag
from procs.placement import Threads
from procs.profiling import StepProfiler
from procs.runtime import Runtime
from procs.target_steps import TargetSteps
from ssd_pipe.config import config_from_mapping
from ssd_pipe.dimensions import dimensions
from tests.models.tiny import make_tiny
from tests.rounds.local_pipeline import LocalPipeline

PROMPT = [5, 9, 3]


class Desk:
    """The scheduler's end of the channels, and the target's steps."""

    def __init__(self, model: Path, rundir: RunDir, **how: Any) -> None:
        config = config_from_mapping(
            {
                "mode": "ar",
                "target": {"model": str(model), "threads": 1},
                "scheduler": {"max_num_seqs": 2, "max_model_len": 64},
                "cache": {"block_size": 4},
            }
        )
        runtime = Runtime("target", 0, config, rundir, structlog.get_logger(), StopFlag(), 1)
        self.stopping = runtime.stopping
        self.plans = TypedSender.open(runtime, "plans", StepPlan | Ahead)
        self.results = TypedReceiver.open(runtime, "results", StepResult)
        self.verifier = LocalPipeline("ar", model, model, config, **how).verifier
        self.steps = TargetSteps(
            runtime,
            dimensions(config),
            self.verifier,
            TypedReceiver.open(runtime, "plans", StepPlan | Ahead),
            TypedSender.open(runtime, "results", StepResult),
            Threads(runtime, torch.device("cpu")),
            StepProfiler(runtime),
        )

    def begin(self) -> StepResult:
        """Read the prompt; its first token comes."""
        row = StepRow(0, 0, PROMPT, 0, True, [0, 1, 2, 3])
        self.steps.run(StepPlan(1, [row], [SeqStart(1, 0, NoiseKey())]))
        return self.taken()[0]

    def decode(self, step: int, start: int, token: int) -> list[StepResult]:
        """One planned step; all results that come of it."""
        self.steps.run(StepPlan(step, [StepRow(0, start, [token], 0, True, [])]))
        return self.taken()

    def allow(self, after: int, left: int = 20, stops: list[int] | None = None) -> None:
        self.plans.send(Ahead(after, rows=[RowAhead(0, left, stops or [], [])]))

    def taken(self) -> list[StepResult]:
        found = []
        while (result := self.results.recv(0)) is not None:
            found.append(result)
        return found


@pytest.fixture
def desk(tmp_path: Path, shm_dir: Path) -> Iterator[Desk]:
    with RunDir.create(shm_dir, "r") as rundir:
        yield Desk(make_tiny(tmp_path, vocab_size=61), rundir)


def test_with_leave_the_next_step_comes_by_itself(desk: Desk) -> None:
    token = desk.begin().outcomes[0].token
    planned = [desk.decode(2, 3, token)[0]]
    planned += desk.decode(3, 4, planned[0].outcomes[0].token)
    assert not any(result.found for result in planned)
    desk.allow(after=2)
    both = desk.decode(2, 3, token)
    assert [result.step for result in both] == [2, 3]
    assert [r.outcomes for r in both] == [r.outcomes for r in planned]
    assert both[0].found[0].chain == []
    assert both[0].finished_ns <= both[0].looked_up_ns <= both[1].started_ns
    assert not both[1].found  # leave is for one step


def test_leave_ends_when_it_is_withdrawn_or_void(desk: Desk) -> None:
    token = desk.begin().outcomes[0].token
    following = desk.decode(2, 3, token)[0].outcomes[0].token
    desk.allow(after=2)
    desk.plans.send(Ahead(2))
    assert len(desk.decode(2, 3, token)) == 1
    desk.allow(after=1)  # too late
    assert len(desk.decode(2, 3, token)) == 1
    desk.allow(after=2, stops=[following])
    assert len(desk.decode(2, 3, token)) == 1
    desk.allow(after=2, left=1)
    assert len(desk.decode(2, 3, token)) == 1
    desk.allow(after=2)
    desk.stopping.set("test")
    assert len(desk.decode(2, 3, token)) == 1


def test_where_no_draft_waits_the_next_step_is_begun_before_anybody_hears(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = desk.begin().outcomes[0].token
    heard: list[StepResult] = []
    queue = desk.verifier.queue

    def noted(plan: StepPlan, begun: bool = False) -> bool:
        heard.extend(desk.taken())
        return queue(plan, begun)

    monkeypatch.setattr(desk.verifier, "queue", noted)
    desk.allow(after=2)
    both = desk.decode(2, 3, token)
    assert not heard
    assert [result.step for result in both] == [2, 3]
