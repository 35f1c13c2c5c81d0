"""A target with leave goes on by itself; without it, or told otherwise, it waits for a plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from ipc.channel import TypedReceiver, TypedSender
from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Ahead, RowAhead, SeqStart, StepPlan, StepResult, StepRow
from ipc.round_records import WAIT_BRANCHES
from ipc.rundir import RunDir
from ipc.segments import create_or_open_segment
from procs import channels, target_steps
from procs.liveness import StopFlag
from procs.placement import Threads
from procs.profiling import StepProfiler
from procs.runtime import Runtime
from procs.target_steps import TargetSteps
from ssd_pipe.config import Mode, config_from_mapping
from ssd_pipe.dimensions import dimensions
from ssd_pipe.engine.partition import Share
from ssd_pipe.engine.partitioned_cache import PartitionedCache, make_part, size_bytes
from tests.models.tiny import make_tiny
from tests.rounds.local_pipeline import LocalPipeline

PROMPT = [5, 9, 3]
K = 3


class Desk:
    """The scheduler's end of the channels, and the target's steps."""

    def __init__(
        self, model: Path, rundir: RunDir, mode: Mode = "ar", spins: bool = False, **how: Any
    ) -> None:
        config = config_from_mapping(
            {
                "mode": mode,
                "target": {"model": str(model), "threads": 1},
                "draft": {"model": str(model)},
                "speculation": {"k": K},
                "scheduler": {"max_num_seqs": 2, "max_model_len": 64},
                "cache": {"block_size": 4},
            }
        )
        runtime = Runtime("target", 0, config, rundir, structlog.get_logger(), StopFlag(), 1)
        self.stopping = runtime.stopping
        self.plans = TypedSender.open(runtime, "plans", StepPlan | Ahead)
        self.results = TypedReceiver.open(runtime, "results", StepResult)
        self.sizes = dimensions(config)
        self.verifier = LocalPipeline(mode, model, model, config, **how).verifier
        self.steps = TargetSteps(
            runtime,
            self.sizes,
            self.verifier,
            TypedReceiver.open(runtime, "plans", StepPlan | Ahead),
            TypedSender.open(runtime, "results", StepResult),
            Threads(runtime, torch.device("cpu")),
            StepProfiler(runtime),
            spins=spins,
        )

    def begin(self) -> StepResult:
        """Read the prompt; its first token comes."""
        row = StepRow(0, 0, PROMPT, 0, True, [0, 1, 2, 3])
        self.steps.run(StepPlan(1, [row], [SeqStart(1, 0, NoiseKey())]))
        return self.taken()[0]

    def decode(
        self, step: int, start: int, token: int, chain: Sequence[int] = ()
    ) -> list[StepResult]:
        """One planned step; all results that come of it."""
        row = StepRow(0, start, [token, *chain], len(chain), True, [])
        self.steps.run(StepPlan(step, [row]))
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


# ---------------------------------------------------------------- chains that grow

PREFIX = 77
DEADLINE = 60.0  # seconds


class Chain:
    """A target that waits by itself, and a cached chain of up to ``K`` tokens for its next outcome.

    ``when_awaited`` does something, on a thread, once the draft is told that one more token is
    wanted.
    """

    def __init__(self, model: Path, rundir: RunDir, spins: bool = True, **how: Any) -> None:
        self.desk = Desk(model, rundir, "ssd", spins, **how)
        sizes = self.desk.sizes
        shape = (sizes.slots, sizes.branches, sizes.k)
        memory = create_or_open_segment(
            rundir.segment(channels.SPECULATION_CACHE), size_bytes(*shape, 1)
        )
        self.part = make_part(memory, *shape, Share(0, 1))
        self.first = self.desk.begin().outcomes[0].token
        self.outcome = self.desk.decode(2, 3, self.first)[0].outcomes[0].token
        self.part.begin_round(0, [(PREFIX, 0, self.outcome)], [K])
        self._threads: list[threading.Thread] = []

    def publish(self, depth: int) -> None:
        self.part.publish_depth(0, depth, [10 + depth])

    def when_awaited(self, act: Callable[[], None]) -> None:
        def wait() -> None:
            end = time.monotonic() + DEADLINE
            while not self.part.reader_waits and time.monotonic() < end:
                time.sleep(0)
            act()

        self._threads.append(threading.Thread(target=wait))
        self._threads[-1].start()

    def decode(self, waits: int, withdrawn: bool = False) -> list[StepResult]:
        """The step again, with leave to go on; bit d of ``waits``: d tokens wait for one more.

        ``withdrawn``: the leave, after the target has heard of it.
        """
        leave = Ahead(2, K, waits, [RowAhead(PREFIX, 20, [], [])])
        self.desk.plans.send(leave)
        if withdrawn:
            go_on = self.desk.verifier.go_on

            def heard(plan: StepPlan, leave: Ahead) -> bool:
                self.desk.plans.send(Ahead(2))
                return go_on(plan, leave)

            self.desk.verifier.go_on = heard  # type: ignore[method-assign]
        results = self.desk.decode(2, 3, self.first)
        for thread in self._threads:
            thread.join()
        return results


@pytest.fixture
def chain(tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chain]:
    monkeypatch.setattr(target_steps, "PATIENCE_NS", int(DEADLINE * 1e9))
    with RunDir.create(shm_dir, "r") as rundir:
        yield Chain(make_tiny(tmp_path, vocab_size=61), rundir)


@pytest.mark.parametrize(("ready", "waits"), [(0, 0b1), (1, 0b11), (1, 0b10)])
def test_a_chain_that_is_worth_it_is_waited_for(chain: Chain, ready: int, waits: int) -> None:
    for depth in range(1, ready + 1):
        chain.publish(depth)
    chain.when_awaited(lambda: chain.publish(ready + 1))
    first, second = chain.decode(waits)
    assert first.found[0].chain == [11, 12][: ready + 1]
    assert first.finished_ns <= first.looked_up_ns < first.waited_ns <= second.started_ns
    assert second.waited_ns == 0
    assert not chain.part.reader_waits


@pytest.mark.parametrize("hit", [True, False])
def test_branches_that_are_late_are_waited_for(
    chain: Chain, hit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain.part.pass_over(0, PREFIX - 1)  # of the round before
    announced, looks = PartitionedCache.announced, 0

    def looked_for(cache: PartitionedCache, slot: int, prefix_hash: int) -> bool:
        nonlocal looks
        looks += 1
        assert not chain.part.reader_waits  # the draft is to go on
        if looks == 3:
            chain.part.begin_round(0, [(PREFIX, 0 if hit else 1, chain.outcome)], [K])
            chain.publish(1)
            chain.publish(2)
        return announced(cache, slot, prefix_hash)

    monkeypatch.setattr(PartitionedCache, "announced", looked_for)
    first, *rest = chain.decode(WAIT_BRANCHES | 0b11)
    assert [found.chain for found in first.found] == ([[11, 12]] if hit else [])
    assert first.looked_up_ns < first.waited_ns
    assert len(rest) == hit


def test_a_wait_ends_with_what_the_scheduler_says(chain: Chain) -> None:
    chain.when_awaited(lambda: chain.desk.plans.send(Ahead(2)))
    [result] = chain.decode(0b1)
    assert not result.found
    assert 0 < result.looked_up_ns < result.waited_ns


def test_a_plan_that_comes_meanwhile_is_the_next_step(chain: Chain) -> None:
    plan = StepPlan(3, [StepRow(0, 3, [7], 0, True, [])])
    chain.when_awaited(lambda: chain.desk.plans.send(plan))
    first, second = chain.decode(0b1)
    assert not first.found
    assert second.step == 3


def test_a_wait_ends_when_the_process_is_to_stop(chain: Chain) -> None:
    chain.when_awaited(lambda: chain.desk.stopping.set("test"))
    [result] = chain.decode(0b1)
    assert not result.found


def test_nobody_waits_long_for_a_chain(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_steps, "PATIENCE_NS", 1_000_000)
    [result] = chain.decode(0b1)
    assert not result.found
    assert result.waited_ns - result.looked_up_ns >= 1_000_000
    assert not chain.part.reader_waits


def test_where_nobody_spins_the_scheduler_waits(tmp_path: Path, shm_dir: Path) -> None:
    with RunDir.create(shm_dir, "r") as rundir:
        chain = Chain(make_tiny(tmp_path, vocab_size=61), rundir, spins=False)
        [result] = chain.decode(0b1)
        assert (result.found, result.looked_up_ns, result.waited_ns) == ([], 0, 0)
