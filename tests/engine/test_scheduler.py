"""Random requests, outcomes, aborts: nothing is lost, shared, or over budget."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.messages.requests import AddRequest
from ipc.messages.sampling import NoiseKey
from ipc.messages.target import RowOutcome
from ssd_pipe.engine.blocks import BlockManager, BlockTable
from ssd_pipe.engine.request import Request, Status
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.engine.step import Step
from ssd_pipe.errors import RequestError

K, BLOCK, BUDGET, SLOTS, MAX_LEN = 3, 4, 24, 4, 60


def make_scheduler(blocks: int = 40, prefix_caching: bool = True) -> Scheduler:
    return Scheduler(
        blocks=BlockManager(blocks, BLOCK, prefix_caching),
        max_num_seqs=SLOTS,
        max_model_len=MAX_LEN,
        max_batched_tokens=BUDGET,
        lookahead=K,
        max_waiting=50,
    )


def make_request(rid: int, tokens: list[int], max_tokens: int, stops: list[int]) -> Request:
    message = AddRequest(rid, tokens, max_tokens, NoiseKey(), stops, 0)
    return Request.from_message(message, 1, BlockTable())


class Target:
    """Stands at the other end of the plans and believes only what they say."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.kv: dict[int, int] = {}

    def run(self, scheduler: Scheduler, step: Step, rng: random.Random) -> list[RowOutcome]:
        for row in step.decoding:
            room = scheduler.chain_room(row.request)
            row.request.chain = [rng.randrange(50) for _ in range(rng.randint(0, room))]
        plan = step.to_plan({})
        assert sum(len(row.tokens) for row in plan.rows) <= BUDGET
        for slot in plan.drop:
            self.blocks.pop(slot, None)
        for start in plan.begin:
            assert start.slot not in self.blocks
            self.blocks[start.slot] = []
        outcomes = []
        written: set[int] = set()
        for row in plan.rows:
            table = self.blocks[row.slot]
            table += row.blocks
            for position in range(row.start, row.start + len(row.tokens)):
                place = table[position // BLOCK] * BLOCK + position % BLOCK
                assert place not in written, "two rows write one place"
                written.add(place)
                self.kv[place] = row.tokens[position - row.start]
            if row.sample:
                outcomes.append(RowOutcome(rng.randint(0, row.chain), rng.randrange(50)))
        return outcomes

    def check_context(self, request: Request) -> None:
        """What lies in memory before the next token is the request's own text."""
        table = request.table.blocks
        for position in range(request.computed):
            place = table[position // BLOCK] * BLOCK + position % BLOCK
            assert self.kv[place] == request.tokens[position]


@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(17, 60),
    count=st.integers(1, 12),
    prefix_caching=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_traffic(seed: int, blocks: int, count: int, prefix_caching: bool) -> None:
    rng = random.Random(seed)
    scheduler, target = make_scheduler(blocks, prefix_caching), Target()
    shared = [rng.randrange(50) for _ in range(30)]
    requests, emitted, finished = [], {}, {}
    for rid in range(count):
        prompt = shared[: rng.randint(0, 30)] + [
            rng.randrange(50) for _ in range(rng.randint(1, 9))
        ]
        request = make_request(rid, prompt, rng.randint(1, 30), [7] if rng.random() < 0.3 else [])
        requests.append((request, list(prompt)))
        emitted[rid] = []
        scheduler.add(request)
    aborted = set()
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        slots = [row.request.slot for row in step.rows]
        assert len(set(slots)) == len(slots)
        outcomes = target.run(scheduler, step, rng)
        for emission in scheduler.apply(step, outcomes):
            emitted[emission.request.rid] += emission.tokens
            if emission.finish:
                finished[emission.request.rid] = emission.finish
        for request in scheduler.running:
            target.check_context(request)
        if rng.random() < 0.05:
            rid = rng.randrange(count)
            if scheduler.abort(rid) is not None:
                aborted.add(rid)
    for request, prompt in requests:
        assert request.status is Status.FINISHED
        assert request.tokens == prompt + emitted[request.rid]
        assert len(request.tokens) <= request.limit <= MAX_LEN
        if request.rid in aborted:
            continue
        if finished[request.rid] == "stop":
            assert emitted[request.rid][-1] == 7
        else:
            assert len(request.tokens) == request.limit
        assert 7 not in emitted[request.rid][:-1] or not request.stop_ids
    assert scheduler.blocks.num_free == blocks
    assert sorted(scheduler._free_slots) == list(range(SLOTS))


def test_decoding_goes_before_prompts_and_prompts_come_in_chunks() -> None:
    scheduler, target, rng = make_scheduler(60), Target(), random.Random(0)
    scheduler.add(make_request(0, [1, 2, 3], 20, []))
    step = scheduler.schedule()
    assert step is not None
    scheduler.apply(step, target.run(scheduler, step, rng))
    scheduler.add(make_request(1, list(range(50)), 5, []))
    sizes = []
    while scheduler.running[-1].rid != 1 or not scheduler.running[-1].prefilled:
        step = scheduler.schedule()
        assert step is not None
        assert step.rows[0].decoding
        assert step.rows[0].request.rid == 0
        sizes.append(step.rows[1].count)
        scheduler.apply(step, target.run(scheduler, step, rng))
    assert sum(sizes) == 50
    assert len(sizes) == 3


def test_limits_are_told_by_name() -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match="max_model_len = 60") as too_long:
        scheduler.add(make_request(0, [1] * 60, 1, []))
    assert too_long.value.code == 400
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(make_request(0, [], 1, []))
    for rid in range(50):
        scheduler.add(make_request(rid, [1], 1, []))
    with pytest.raises(RequestError) as full:
        scheduler.add(make_request(99, [1], 1, []))
    assert full.value.code == 429


def test_max_tokens_is_clipped_to_the_context() -> None:
    scheduler, target, rng = make_scheduler(), Target(), random.Random(1)
    request = make_request(0, [1] * 55, 1000, [])
    scheduler.add(request)
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        scheduler.apply(step, target.run(scheduler, step, rng))
    assert len(request.tokens) == MAX_LEN


def test_outcomes_that_do_not_fit_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(0, [1, 2], 4, []))
    step = scheduler.schedule()
    assert step is not None
    with pytest.raises(ValueError, match="1 rows sampled"):
        scheduler.apply(step, [])
    with pytest.raises(ValueError, match="accepted"):
        scheduler.apply(step, [RowOutcome(1, 3)])


def decode_all(scheduler: Scheduler, steps: int) -> None:
    """So many steps in which every proposal is refused."""
    for _ in range(steps):
        step = scheduler.schedule()
        if step is None:
            return
        scheduler.apply(step, [RowOutcome(0, 9) for _ in step.sampled])


def test_a_known_prefix_is_not_counted_as_room_and_as_found_at_once() -> None:
    """Else its request would come in and be preempted again, step by step."""
    scheduler = Scheduler(BlockManager(20, BLOCK), SLOTS, 80, 64, 0, 10)
    prefix = list(range(100, 132))
    scheduler.add(make_request(1, [*prefix, 1], 1, []))
    decode_all(scheduler, 1)
    scheduler.add(make_request(2, list(range(200, 239)), 30, []))
    decode_all(scheduler, 1)
    scheduler.add(make_request(3, [*prefix, *range(300, 320)], 20, []))
    hits = scheduler.blocks.hit_tokens
    decode_all(scheduler, 20)
    assert scheduler.preemptions <= 1
    assert scheduler.blocks.hit_tokens - hits <= 2 * len(prefix)
    decode_all(scheduler, 80)
    assert not scheduler.has_work


def test_a_short_prompt_is_read_beside_a_long_one() -> None:
    blocks = BlockManager(200, BLOCK)
    scheduler = Scheduler(blocks, SLOTS, 400, BUDGET, K, 10, long_prefill=BUDGET // 4)
    scheduler.add(make_request(1, list(range(300)), 5, []))
    scheduler.add(make_request(2, [1, 2, 3], 5, []))
    step = scheduler.schedule()
    assert step is not None
    assert [(row.request.rid, row.count, row.sample) for row in step.rows] == [
        (1, BUDGET // 4, False),
        (2, 3, True),
    ]
    scheduler.apply(step, [RowOutcome(0, 9)])
    step = scheduler.schedule()
    assert step is not None
    assert [(row.request.rid, row.count) for row in step.rows] == [(2, 1), (1, BUDGET // 4)]
