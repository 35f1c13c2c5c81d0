"""Nobody starves: requests begin in the order they came, and all of them move with every step."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.messages.requests import AddRequest
from ipc.messages.sampling import NoiseKey
from ipc.messages.target import RowOutcome
from ssd_pipe.engine.blocks import BlockManager, BlockTable
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.engine.step import Step

BLOCK, MAX_LEN = 4, 200


def make(slots: int, budget: int, blocks: int) -> Scheduler:
    return Scheduler(
        blocks=BlockManager(blocks, BLOCK),
        max_num_seqs=slots,
        max_model_len=MAX_LEN,
        max_batched_tokens=budget,
        lookahead=5,
        max_waiting=500,
    )


def add(scheduler: Scheduler, rid: int, prompt: int, output: int) -> Request:
    tokens = [rid % 50 + 1] * prompt
    message = AddRequest(rid, tokens, output, NoiseKey(), [], 0)
    request = Request.from_message(message, 1, BlockTable())
    scheduler.add(request)
    return request


def run(scheduler: Scheduler, step: Step, rng: random.Random) -> list[int]:
    """Finish a step; returns the ids of rows that got a token."""
    outcomes = []
    for row in step.sampled:
        if row.decoding:
            room = scheduler.chain_room(row.request)
            row.request.chain = [rng.randrange(50) for _ in range(rng.randint(0, room))]
        outcomes.append(RowOutcome(rng.randint(0, len(row.request.chain)), rng.randrange(50)))
    plan = step.to_plan({})
    assert sum(len(row.tokens) for row in plan.rows) <= scheduler.max_batched_tokens
    return [e.request.rid for e in scheduler.apply(step, outcomes)]


@given(
    seed=st.integers(0, 2**32),
    slots=st.sampled_from([1, 4, 16, 64]),
    budget=st.sampled_from([64, 96, 512]),
    lookahead=st.integers(0, 12),
)
@settings(max_examples=60, deadline=None)
def test_every_step_moves_everybody_and_admission_is_in_order(
    seed: int, slots: int, budget: int, lookahead: int
) -> None:
    """With room for all: each decoding sequence gets a token in every step, however many come
    behind it, and the oldest unread prompt always gets on."""
    rng = random.Random(seed)
    scheduler = make(slots, budget, 64 * MAX_LEN // BLOCK)
    coming = [(rid, rng.randint(1, 150), rng.randint(1, 20)) for rid in range(64)]
    begun: list[int] = []
    first_tokens: list[int] = []
    while coming or scheduler.has_work:
        for _ in range(rng.randint(0, 3)):
            if coming:
                add(scheduler, *coming.pop(0))
        scheduler.lookahead = rng.randint(0, lookahead)  # as a controller sets it
        decoding = {r.rid for r in scheduler.running if r.prefilled}
        reading = [r for r in scheduler.running if not r.prefilled]
        before = {r.rid: r.computed for r in reading}
        step = scheduler.schedule()
        if step is None:
            assert not scheduler.has_work
            continue
        begun += [request.rid for request in step.begun]
        got = run(scheduler, step, rng)
        assert decoding <= set(got)
        first_tokens += [rid for rid in got if rid not in decoding]
        if reading:
            assert reading[0].computed > before[reading[0].rid]
    assert begun == sorted(begun) == list(range(64))
    assert first_tokens == sorted(first_tokens)
    assert scheduler.preemptions == 0


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_scarce_blocks_delay_the_young_never_the_oldest(seed: int) -> None:
    """Preemption takes from the newest: the oldest running sequence gets a token every step, so
    every request is the oldest at some time and ends."""
    rng = random.Random(seed)
    scheduler = make(16, 96, 120)
    requests = [add(scheduler, rid, rng.randint(1, 100), rng.randint(1, 60)) for rid in range(40)]
    steps = 0
    while scheduler.has_work:
        oldest = scheduler.running[0] if scheduler.running else None
        decodes = oldest is not None and oldest.prefilled
        step = scheduler.schedule()
        assert step is not None
        got = run(scheduler, step, rng)
        if decodes and oldest is not None:
            assert oldest.rid in got
        steps += 1
        assert steps < 40 * (60 + 2)  # as if they ran one after the other
    assert all(len(r.tokens) == r.limit for r in requests)
    assert scheduler.blocks.num_free == 120
