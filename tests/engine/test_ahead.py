"""Steps begun by the target itself commit what planned ones do: tokens, blocks, counters."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Ahead, Found, RowAhead, RowOutcome, StepPlan, StepRow
from ipc.round_records import WAIT_BRANCHES
from ssd_pipe.config import SpeculationSection
from ssd_pipe.engine.ahead import Aheads, Growing, Unannounced, follow_on
from ssd_pipe.engine.effort import OFF
from ssd_pipe.engine.partition import Share
from ssd_pipe.engine.partitioned_cache import PartitionedCache, make_part, size_bytes
from ssd_pipe.engine.round_pace import RoundSeen
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.step import Step
from tests.engine.test_leases import SLOTS, SPEC, VOCAB, K, Side, World, prefilled, request_of


class AheadSide(Side):
    """A scheduler whose target goes ahead wherever it may, but for leave withdrawn at random.

    ``begun`` counts the steps that the target began.
    """

    def __init__(self, world: World, blocks: int, spec: SpeculationSection = SPEC) -> None:
        super().__init__(world, False, blocks)
        self.aheads = Aheads(self.scheduler, self.planner, spec)
        self.begun = 0

    def run(self, rng: random.Random) -> None:
        while self.scheduler.has_work:
            self.scheduler.lookahead = self.planner.decide(self.scheduler.load).k
            step: Step | None = self.scheduler.schedule()
            assert step is not None
            self.tell_draft(step)
            plan = step.to_plan({})
            while step is not None:
                step, plan = self.one(step, plan, rng)

    def one(self, step: Step, plan: StepPlan, rng: random.Random) -> tuple[Step | None, StepPlan]:
        """The next step if the target begins it, and its plan."""
        leave = self.aheads.offer(step)
        chains = {r.request.slot: r.request.chain if r.decoding else [] for r in step.rows}
        outcomes = []
        for row in step.sampled:
            request, chain = row.request, chains[row.request.slot]
            outcomes.append(self.world.outcome(request.rid, len(request.tokens), chain))
            self.publish(request, outcomes[-1], chain)
        found = None
        if leave is not None and rng.random() > 0.1:
            found = follow_on(leave, plan, outcomes, self.planner.cached._cache)
        if isinstance(found, Growing):  # nobody waits here
            found = None
        slots = [row.request.slot for row in step.sampled]
        emissions = self.scheduler.apply(step, outcomes)
        for i, (slot, emission) in enumerate(zip(slots, emissions, strict=True)):
            if found is None:
                self.planner.settle(emission, len(chains[slot]))
            else:
                own = found[1][i]
                self.planner.settle_found(emission, len(chains[slot]), own.chain, own.entry)
            self.planner.conclude(emission)
        self.world.emit(emissions)
        if leave is None or found is None:
            return None, plan
        assert not any(emission.finish for emission in emissions)
        following = self.aheads.follow(step, leave)
        self.tell_draft(following)
        # What the target made of its leave is what the scheduler would have sent.
        announced = {r.request.rid: r.request.announced for r in following.rows}
        assert [(r.start, r.tokens, r.chain) for r in following.to_plan({}).rows] == [
            (r.start, r.tokens, r.chain) for r in found[0].rows
        ]
        assert announced == {r.request.rid: r.request.announced for r in following.rows}
        assert found[0].step == following.number
        self.begun += 1
        return following, found[0]

    def tell_draft(self, step: Step) -> None:
        room = {r.request.slot: self.scheduler.chain_room(r.request) for r in step.decoding}
        self.planner.plan_draft(step, self.planner.prepare(step, room), {})


@given(seed=st.integers(0, 2**32), count=st.integers(1, 5), blocks=st.integers(40, 80))
@settings(max_examples=80, deadline=None)
def test_going_ahead_equals_scheduling(seed: int, count: int, blocks: int) -> None:
    sides = [Side(World(seed), False, blocks), AheadSide(World(seed), blocks)]
    for side in sides:
        rng = random.Random(seed)
        for rid in range(count):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
            stops = [rng.randrange(VOCAB)] if rng.random() < 0.3 else []
            side.add(request_of(rid, prompt, rng.randint(1, 30), stops=stops))
        side.run(rng)
    plain, ahead = sides
    assert ahead.world.outputs == plain.world.outputs
    assert ahead.world.finish == plain.world.finish
    for a, b in zip(plain.requests, ahead.requests, strict=True):
        assert (a.tokens, a.prefix_hash) == (b.tokens, b.prefix_hash)
        assert (a.rounds, a.drafted, a.accepted) == (b.rounds, b.drafted, b.accepted)
        assert (a.hits, a.misses) == (b.hits, b.misses)
    assert ahead.counters == plain.counters
    assert ahead.scheduler.blocks.num_free == plain.scheduler.blocks.num_free == blocks


def test_the_target_does_go_ahead() -> None:
    side = AheadSide(World(1), 60)
    side.add(request_of(0, [1, 2, 3], 40))
    side.run(random.Random(1))
    assert side.begun >= 5


def offered(side: AheadSide) -> Ahead | None:
    """Leave for the step after the next one."""
    side.scheduler.lookahead = side.planner.decide(side.scheduler.load).k
    step = side.scheduler.schedule()
    assert step is not None
    return side.aheads.offer(step)


def test_leave_has_blocks_for_two_steps_and_ends_with_the_last_token() -> None:
    side = AheadSide(World(2), 40)
    request = request_of(0, [1, 2, 3], 50)
    prefilled(side, request)
    leave = offered(side)
    assert leave is not None
    assert leave.rows[0].left == request.room
    assert leave.rows[0].prefix_hash == request.prefix_hash
    assert len(request.table.blocks) * 4 >= request.computed + 1 + K + 1


def test_no_leave_where_the_next_step_may_be_another() -> None:
    beside_a_prompt = AheadSide(World(3), 60)
    prefilled(beside_a_prompt, request_of(0, [1], 40))
    beside_a_prompt.add(request_of(1, list(range(9)) * 3, 9))
    assert offered(beside_a_prompt) is None
    in_line = AheadSide(World(3), 60)
    prefilled(in_line, *(request_of(rid, [1], 40) for rid in range(SLOTS)))
    in_line.add(request_of(9, [1], 40))
    assert offered(in_line) is None
    short_of_blocks = AheadSide(World(3), 4)
    prefilled(short_of_blocks, request_of(0, [1] * 8, 8))
    assert offered(short_of_blocks) is None
    turns = AheadSide(World(3), 60)
    turns.planner = RoundPlanner("sd", SPEC, None)
    turns.aheads = Aheads(turns.scheduler, turns.planner, SPEC)
    prefilled(turns, request_of(0, [1], 40))
    assert offered(turns) is None


@pytest.mark.parametrize(("temperature", "given"), [(0.0, True), (0.5, False)])
def test_no_leave_where_distributions_are_handed_over(temperature: float, given: bool) -> None:
    side = AheadSide(World(4), 60, SpeculationSection(k=K, rule="rejection", adaptive=False))
    prefilled(side, request_of(0, [1], 40, key=NoiseKey(1, temperature)))
    assert (offered(side) is not None) is given


@pytest.mark.parametrize("paused", [False, True])
def test_a_forecast_does_not_outlive_a_pause(paused: bool) -> None:
    """What was learnt after it then counts, though as many rows run as before."""
    planner = RoundPlanner("ssd", SpeculationSection(k=K), None)
    planner.decide(1)
    effort = planner.decide(1)
    seen = RoundSeen(
        decision=planner.decision, fed=K + 1, verify_seconds=1.0, seconds=99.0, chains=[K]
    )
    assert planner.foresee(1) == effort
    planner.pace.observe(seen, emitted=1)
    if paused:
        planner.idle()
    assert planner.decide(1) == (OFF if paused else effort)


def cached(depth: int, goal: int) -> PartitionedCache:
    """A cache that holds ``depth`` of ``goal`` tokens for outcome (1, 7) after prefix 5."""
    memory = bytearray(size_bytes(1, 4, K, 1))
    part = make_part(memory, 1, 4, K, Share(0, 1))
    part.begin_round(0, [(5, 1, 7)], [goal])
    for d in range(1, depth + 1):
        part.publish_depth(0, d, [10 + d])
    return PartitionedCache(memory, 1, 4, K)


PLAN = StepPlan(3, [StepRow(0, 20, [4, 6, 8], 2, True, [])])


def leave(**more: Any) -> Ahead:
    row = {"prefix_hash": 5, "left": 9, "stop_ids": [2], "blocks": [33]} | more.pop("row", {})
    return Ahead(**{"after": 3, "k": K, "rows": [RowAhead(**row)]} | more)


def followed(
    leave: Ahead, outcome: RowOutcome, cache: PartitionedCache | None
) -> tuple[StepPlan, list[Found]]:
    """The next step, which must be there."""
    found = follow_on(leave, PLAN, [outcome], cache)
    assert found is not None
    assert not isinstance(found, Growing)
    return found


def test_the_next_step_follows_from_the_outcome() -> None:
    found = followed(leave(), RowOutcome(1, 7), cached(2, 2))
    assert found[0] == StepPlan(4, [StepRow(0, 22, [7, 11, 12], 2, True, [33])])
    assert found[1][0].chain == [11, 12]
    alone = followed(leave(k=0), RowOutcome(0, 7), None)
    assert alone[0].rows[0] == StepRow(0, 21, [7], 0, True, [33])
    assert alone[1][0].entry == -1


def test_chains_are_cut_to_what_is_left() -> None:
    for left, expected in ((4, [11]), (5, [11, 12])):
        found = followed(leave(row={"left": left}), RowOutcome(1, 7), cached(2, 2))
        assert found[1][0].chain == expected


@pytest.mark.parametrize(
    ("given", "outcome", "cache"),
    [
        (leave(after=2), RowOutcome(1, 7), cached(2, 2)),
        (leave(rows=[]), RowOutcome(1, 7), cached(2, 2)),
        (leave(), RowOutcome(0, 7), cached(2, 2)),  # a miss
        (leave(), RowOutcome(1, 7), cached(0, 2)),  # nothing of it is ready
        (leave(), RowOutcome(1, 7), None),
        (leave(row={"stop_ids": [7]}), RowOutcome(1, 7), cached(2, 2)),
        (leave(row={"stop_ids": [6]}), RowOutcome(1, 7), cached(2, 2)),  # within the chain
        (leave(row={"left": 2}), RowOutcome(1, 7), cached(2, 2)),
        (leave(row={"left": 3}), RowOutcome(1, 7), cached(2, 2)),  # no room for a chain
        (leave(), RowOutcome(1, 7, failure="no"), cached(2, 2)),
    ],
)
def test_what_needs_the_scheduler(
    given: Ahead, outcome: RowOutcome, cache: PartitionedCache | None
) -> None:
    assert follow_on(given, PLAN, [outcome], cache) is None


@pytest.mark.parametrize(
    ("waits", "depth", "goal", "last"),
    [
        (0b1, 0, 1, False),  # the draft ends there by itself
        (0b1, 0, 3, True),
        (0b11, 0, 3, False),
        (0b10, 1, 3, True),
        (0b10, 1, 2, False),
    ],
)
def test_a_chain_that_is_worth_a_wait_is_not_there_yet(
    waits: int, depth: int, goal: int, last: bool
) -> None:
    found = follow_on(leave(waits=waits), PLAN, [RowOutcome(1, 7)], cached(depth, goal))
    assert found == Growing(slot=0, entry=0, depth=depth, last=last)


def test_branches_that_are_late_are_waited_for_until_they_are_announced() -> None:
    memory = bytearray(size_bytes(1, 4, K, 1))
    part = make_part(memory, 1, 4, K, Share(0, 1))
    cache = PartitionedCache(memory, 1, 4, K)
    part.begin_round(0, [(4, 1, 7)])  # of the round before
    patient, outcomes = leave(waits=WAIT_BRANCHES | 1), [RowOutcome(1, 7)]
    late = follow_on(patient, PLAN, outcomes, cache)
    assert isinstance(late, Unannounced)
    assert late == (0, 5)
    assert late.lasts(cache)
    assert follow_on(leave(waits=1), PLAN, outcomes, cache) is None
    part.begin_round(0, [(5, 0, 7)])
    assert not late.lasts(cache)
    assert follow_on(patient, PLAN, outcomes, cache) is None  # a miss
    part.begin_round(0, [(5, 1, 7)])
    assert follow_on(patient, PLAN, outcomes, cache) == Growing(0, 0, 0, True)


def test_a_chain_that_will_not_grow_or_is_long_enough_waits_for_nothing() -> None:
    assert followed(leave(waits=0b10), RowOutcome(1, 7), cached(1, 1))
    assert followed(leave(waits=0b100), RowOutcome(1, 7), cached(1, 2))
    short = followed(leave(waits=0b10, row={"left": 4}), RowOutcome(1, 7), cached(1, 2))
    assert short[1][0].chain == [11]  # there is room for no more


def test_no_row_waits_where_another_needs_the_scheduler() -> None:
    rows = [PLAN.rows[0], StepRow(0, 20, [4], 0, True, [])]
    own = leave().rows[0]
    both = leave(waits=1, rows=[own, own])
    outcomes = [RowOutcome(1, 7), RowOutcome(0, 9)]
    assert follow_on(both, StepPlan(3, rows), outcomes, cached(0, 2)) is None


@pytest.mark.parametrize(("count", "waits"), [(1, True), (2, False)])
def test_in_a_batch_no_row_makes_others_wait(count: int, waits: bool) -> None:
    side = AheadSide(World(5), 90)
    prefilled(side, *(request_of(rid, [1], 40) for rid in range(count)))
    given = offered(side)
    assert given is not None
    assert bool(given.waits & 1) is waits
