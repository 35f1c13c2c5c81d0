"""The controller against simulated machines: it finds what pays and never costs much."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_pipe.engine.adaptive import Decision, EffortController
from ssd_pipe.engine.effort import OFF, Effort, Record, batch_bucket, ladder, neighbours
from ssd_pipe.engine.pacing import AcceptanceEstimator

K, BUDGET = 5, 12


@dataclass
class Machine:
    """Times in units of reading the target's weights once.

    ``ridge``: tokens from which a target step is bound by arithmetic. ``draft``: a draft pass,
    which takes longer from ``ridge`` tokens on too. ``apart``: draft and target have a device each;
    otherwise the target has half of it while the draft works. The target does not wait for the end
    of the draft's round, only, alone, for the first token of a hit. ``slowness`` is everybody's.
    """

    ridge: float
    draft: float
    acceptance: float
    apart: bool
    noise: float = 0.05
    overhead: float = 0.03
    slowness: float = 1.0

    def target(self, tokens: int) -> float:
        return self.slowness * max(1.0, tokens / self.ridge)

    def pass_of(self, tokens: int) -> float:
        return self.slowness * self.draft * max(1.0, tokens / self.ridge)

    def seconds(self, effort: Effort, rows: int) -> float:
        if effort.alone:
            verify = self.target(rows * (effort.k + 1))
            return self.overhead + verify + effort.k * self.pass_of(rows)
        glue, step = self.drafting(effort, rows)
        verify = self.verifying(effort, rows)
        return self.overhead + (max(verify, glue + step) if rows == 1 else verify)

    def drafting(self, effort: Effort, rows: int) -> tuple[float, float]:
        return self.pass_of(rows * (effort.k + 1)), self.pass_of(rows * effort.branches)

    def verifying(self, effort: Effort, rows: int) -> float:
        return (1.0 if self.apart else 2.0) * self.target(rows * (effort.k + 1))

    def depth(self, effort: Effort, rows: int) -> int:
        """Tokens of a branch when the verification ends."""
        if effort.alone:
            return effort.k
        glue, step = self.drafting(effort, rows)
        ready = int(max(0.0, self.verifying(effort, rows) - glue) / step)
        return min(effort.k, max(ready, int(rows == 1)))

    def hit_rate(self, effort: Effort) -> float:
        return 1 - 0.5 * effort.branches**-0.5

    def round(
        self, effort: Effort, rows: int, rng: random.Random
    ) -> tuple[float, list[int], list[int]]:
        """Wall time, and chain length and accepted tokens of each row."""
        chains, accepted = [], []
        depth = self.depth(effort, rows)
        for _ in range(rows):
            missed = not effort.alone and rng.random() > self.hit_rate(effort)
            chains.append(0 if missed else depth)
            taken = 0
            while taken < chains[-1] and rng.random() < self.acceptance:
                taken += 1
            accepted.append(taken)
        return self.seconds(effort, rows) * rng.lognormvariate(0, self.noise), chains, accepted

    def rate_at(self, effort: Effort, rows: int) -> float:
        """Tokens a row and time, on average."""
        tokens = sum(self.acceptance**j for j in range(self.depth(effort, rows) + 1))
        hits = 1.0 if effort.alone else self.hit_rate(effort)
        return (1 + hits * (tokens - 1)) / self.seconds(effort, rows)


class Run:
    """Rounds of one controller on one machine."""

    def __init__(self, machine: Machine, mode: str = "ssd", seed: int = 0, **options: object):
        self.machine = machine
        self.acceptance = AcceptanceEstimator(K)
        self.controller = EffortController(
            mode,
            K,
            BUDGET,
            self.acceptance,
            **options,  # type: ignore[arg-type]
        )
        self.rng = random.Random(seed)
        self.time = 0.0
        self.plain_time = 0.0
        self.efforts: list[Effort] = []
        self.last: tuple[Decision, float, list[int], int] | None = None

    def rounds(self, rows: int, count: int) -> None:
        for _ in range(count):
            decision = self.controller.decide(rows)
            effort = decision.effort
            self.efforts.append(effort)
            seconds, chains, accepted = self.machine.round(effort, rows, self.rng)
            for taken, chain in zip(accepted, chains, strict=True):
                if chain:
                    self.acceptance.observe(taken, chain)
            tokens = sum(accepted) + rows
            self.time += seconds
            self.plain_time += self.machine.seconds(OFF, rows) * tokens / rows
            self.learn()
            self.last = (decision, seconds, chains, tokens)

    def learn(self) -> None:
        """From the round before: a round is looked at while the next one runs."""
        if self.last is None:
            return
        decision, seconds, chains, tokens = self.last
        fed = len(chains) + sum(chains)
        self.controller.observe_step(decision, fed, self.machine.target(fed))
        self.controller.observe(decision, seconds, chains, tokens)

    def most(self, count: int) -> Effort:
        """What most of the last ``count`` rounds were."""
        recent = self.efforts[-count:]
        return max(set(recent), key=recent.count)


machines = st.builds(
    Machine,
    ridge=st.floats(2.5, 300),
    draft=st.floats(0.01, 0.6),
    acceptance=st.floats(0.05, 0.95),
    apart=st.booleans(),
)


@given(
    machine=machines,
    rows=st.sampled_from([1, 2, 4, 7, 16, 64]),
    mode=st.sampled_from(["sd", "ssd"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=20, deadline=None)
def test_never_much_slower_than_plain_decoding(
    machine: Machine, rows: int, mode: str, seed: int
) -> None:
    run = Run(machine, mode, seed)
    run.rounds(rows, 1500)
    # Time so far against plain decoding of as many tokens; the start-up is in it.
    assert run.time <= 1.05 * run.plain_time


@given(machine=machines, rows=st.sampled_from([1, 4, 16, 64]), seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_ends_near_the_best_effort(machine: Machine, rows: int, seed: int) -> None:
    run = Run(machine, "ssd", seed)
    run.rounds(rows, 2500)
    found = machine.rate_at(run.most(600), rows)
    best = max(machine.rate_at(effort, rows) for effort in neighbours("ssd", K, BUDGET))
    assert found >= 0.85 * best


@given(machine=machines, seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_a_batch_that_changes_all_the_time(machine: Machine, seed: int) -> None:
    run = Run(machine, "ssd", seed)
    rng, rows = random.Random(seed), 20
    for _ in range(300):
        rows = min(64, max(1, rows + rng.randint(-3, 3)))
        run.rounds(rows, rng.randint(1, 8))
    assert run.time <= 1.06 * run.plain_time


def test_speculates_alone_and_not_in_a_large_batch() -> None:
    cpu = Machine(ridge=3, draft=0.08, acceptance=0.72, apart=False)
    run = Run(cpu)
    run.rounds(1, 800)
    assert run.most(100).k >= 2
    run.rounds(64, 800)
    assert run.most(100) == OFF
    run.rounds(1, 100)
    assert run.most(50).k >= 2


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("seed", range(3))
def test_a_larger_batch_is_not_taken_for_a_small_one(mode: str, seed: int) -> None:
    """Where arithmetic binds soon, what paid alone costs with a few rows beside it."""
    run = Run(Machine(ridge=6, draft=0.1, acceptance=0.75, apart=False), mode, seed)
    run.rounds(1, 200)
    assert run.most(50).k >= 2
    run.time = run.plain_time = 0.0
    run.rounds(4, 60)
    assert run.time <= 1.1 * run.plain_time
    run.rounds(4, 240)
    assert run.time <= run.plain_time


def test_works_side_by_side_where_the_draft_has_a_device_of_its_own() -> None:
    run = Run(Machine(ridge=200, draft=0.15, acceptance=0.8, apart=True))
    run.rounds(1, 1500)
    chosen = run.most(200)
    assert chosen.k == K
    assert chosen.branches > 0


def test_follows_a_text_that_becomes_predictable() -> None:
    machine = Machine(ridge=6, draft=0.25, acceptance=0.1, apart=False)
    run = Run(machine)
    run.rounds(2, 1500)
    assert run.most(200) == OFF
    machine.acceptance = 0.95
    run.rounds(2, 8000)
    assert run.most(200).k >= 2


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_slows_down_does_so_for_every_effort(mode: str, seed: int) -> None:
    """What was measured before looks fast beside the present effort, and is not."""
    shares = []
    for slowness in (1.0, 1.4):
        machine = Machine(ridge=4, draft=0.1, acceptance=0.75, apart=False)
        run = Run(machine, mode, seed)
        run.rounds(4, 800)
        assert run.most(100) == OFF
        run.time = run.plain_time = 0.0
        machine.slowness = slowness
        run.rounds(4, 150)
        shares.append(run.time / run.plain_time)
    usual, slowed = shares
    assert slowed <= usual + 0.015


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_that_slows_down_alone_is_found_out(seed: int) -> None:
    machine = Machine(ridge=8, draft=0.05, acceptance=0.75, apart=False)
    run = Run(machine, "sd", seed)
    run.rounds(1, 600)
    assert run.most(100).k >= 2
    machine.draft = 2.0
    run.rounds(1, 200)
    assert run.most(50) == OFF


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("seed", range(2))
def test_steps_larger_than_any_seen_are_not_taken_for_cheap(mode: str, seed: int) -> None:
    """Where steps have grown with their tokens so far, they grow on."""
    run = Run(Machine(ridge=6, draft=0.1, acceptance=0.75, apart=False), mode, seed)
    run.rounds(1, 200)
    run.rounds(4, 200)
    run.time = run.plain_time = 0.0
    run.rounds(16, 200)
    assert run.time <= 1.02 * run.plain_time


def test_trying_costs_a_bounded_share() -> None:
    machine = Machine(ridge=200, draft=0.02, acceptance=0.9, apart=True, noise=0.2)
    run = Run(machine)
    run.rounds(1, 10000)
    usual = run.most(1000)
    others = sum(effort.k < usual.k - 1 for effort in run.efforts)
    assert 0 < others < 600
    assert run.controller.probes > 3


def test_fixed_effort() -> None:
    run = Run(Machine(ridge=2, draft=0.5, acceptance=0.1, apart=False), adaptive=False)
    run.rounds(3, 300)
    assert set(run.efforts) == {Effort(K, BUDGET)}
    assert run.controller.probes == 0


@pytest.mark.parametrize("adaptive", [True, False])
def test_disable_by_batch_size(adaptive: bool) -> None:
    machine = Machine(ridge=1000, draft=0.01, acceptance=0.9, apart=True)
    run = Run(machine, adaptive=adaptive, disable_by_batch_size=4)
    run.rounds(5, 100)
    assert set(run.efforts) == {OFF}
    run.rounds(4, 200)
    assert OFF not in run.efforts[200:]


def test_sd_never_forks() -> None:
    assert all(effort.alone for effort in neighbours("sd", K, BUDGET))
    run = Run(Machine(ridge=100, draft=0.05, acceptance=0.8, apart=False), "sd")
    run.rounds(2, 600)
    assert run.most(100).k >= 3


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("k", [1, 2, 5, 12, 32])
def test_every_effort_can_be_reached_and_left(mode: str, k: int) -> None:
    graph = neighbours(mode, k, 2 * (k + 1))  # type: ignore[arg-type]
    seen, todo = {OFF}, [OFF]
    while todo:
        for effort in graph[todo.pop()]:
            if effort not in seen:
                seen.add(effort)
                todo.append(effort)
    assert seen == set(graph)
    assert all(OFF in others or effort == OFF for effort, others in graph.items())
    assert all(0 <= e.k <= k and 0 <= e.branches <= 2 * (k + 1) for e in graph)


def test_ladder_and_buckets() -> None:
    assert ladder(5) == [5, 3, 2, 1]
    assert ladder(1) == [1]
    buckets = [batch_bucket(rows) for rows in range(1, 257)]
    assert buckets[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert buckets == sorted(buckets)
    assert buckets[63] == 20


def test_a_record_weighs_tokens_by_the_present_acceptance() -> None:
    record = Record(Effort(2, 0))
    for number in range(200):
        record.observe(number, 2.0, [0, 0, 2], 2, 2 * 1.0)
    assert record.rate([0.5, 0.5]) == pytest.approx(1.75 / 2)
    assert record.rate([1.0, 1.0]) == pytest.approx(3 / 2)
    record.observe(200, 1000.0, [0, 0, 2], 2, 2.0)  # the machine slept
    assert record.seconds < 2.2


def test_a_record_learns_what_expectation_overlooks() -> None:
    record = Record(Effort(1, 4))
    for number in range(2000):
        record.observe(number, 1.0, [0, 1], 1, 2.0)
    assert record.tokens([1.0]) < 1.9


def test_an_effort_is_not_judged_by_the_rounds_of_the_one_before() -> None:
    """Its first round may be missing: what was foreseen for it is dropped when the load changes."""
    controller = EffortController("ssd", K, BUDGET, AcceptanceEstimator(K))
    slow, other = Effort(K, BUDGET), Effort(2, BUDGET)
    bucket = batch_bucket(1)
    controller.decide(1)
    for same in range(4):
        decision = Decision(slow, bucket, same)
        controller.observe_step(decision, K + 1, 1.0)
        controller.observe(decision, 30.0, [K], 1)
    assert controller._record(bucket, slow).rejected
    decision = Decision(other, bucket, 2)
    controller.observe_step(decision, 3, 1.0)
    controller.observe(decision, 1.0, [2], 2)
    assert not controller._record(bucket, other).rejected
