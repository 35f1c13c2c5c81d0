"""What the draft is told of a step, and which worker hands over what."""

from __future__ import annotations

from ipc.messages.requests import AddRequest
from ipc.messages.sampling import NoiseKey
from ipc.messages.target import TOKEN_BYTES
from ssd_pipe.engine.blocks import BlockTable
from ssd_pipe.engine.draft_plans import MAX_NEWS_BYTES, DraftPlans
from ssd_pipe.engine.effort import OFF, Effort
from ssd_pipe.engine.partition import maker, owner
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.step import Row, Step

FULL = Effort(4, 10)


def request_of(slot: int, tokens: list[int], temperature: float = 0.0) -> Request:
    message = AddRequest(slot, tokens, 50, NoiseKey(1, temperature), [], 0)
    request = Request.from_message(message, 1, BlockTable())
    request.slot = slot
    return request


def step_of(*requests: Request) -> Step:
    rows = [Row(r, len(r.tokens) - 1, 1, sample=True, decoding=True) for r in requests]
    return Step(1, rows, [], [9])


def test_a_sequence_is_introduced_once_and_then_followed() -> None:
    plans = DraftPlans("shared_noise", 1)
    request = request_of(3, [1, 2, 3])
    plans.begin_step(step_of(request), True)
    first = plans.plan(5, step_of(request), FULL, False, {3: 2}, {})
    assert [(start.slot, start.tokens) for start in first.begin] == [(3, [1, 2, 3])]
    assert (first.round, first.k, first.branches, first.drop) == (5, *FULL, [9])
    [row] = first.rows
    assert (row.length, row.tokens, row.backup, row.fork) == (3, [], 2, True)
    request.tokens += [7, 8]
    request.chain = [4]
    second = plans.plan(6, step_of(request), FULL, False, {}, {})
    [row] = second.rows
    assert not second.begin
    assert (row.length, row.tokens, row.chain, row.backup) == (3, [7, 8], [4], 0)


def test_plain_decoding_tells_nothing_unless_the_draft_is_to_read_along() -> None:
    plans = DraftPlans("shared_noise", 1)
    step = step_of(request_of(0, [1]))
    plans.begin_step(step, False)
    quiet = plans.plan(1, step, OFF, False, {}, {})
    assert (plans.told, quiet.begin, quiet.rows) == (set(), [], [])
    plans.begin_step(step, True)
    [row] = plans.plan(2, step, OFF, True, {}, {}).rows
    assert not row.fork


def test_news_that_are_too_long_come_later() -> None:
    plans = DraftPlans("shared_noise", 1)
    long = [1] * (MAX_NEWS_BYTES // TOKEN_BYTES // 2 + 1)
    step = step_of(*(request_of(slot, long) for slot in range(3)))
    step.rows[2].request.chain = [5]  # something of it may be handed over
    told = []
    for _ in range(2):
        plans.begin_step(step, True)
        told.append(plans.told)
        plans.plan(1, step, FULL, False, {}, {})
    assert told == [{0, 2}, {0, 1, 2}]


def test_one_prompt_is_told_however_long() -> None:
    plans = DraftPlans("shared_noise", 1)
    plans.begin_step(step_of(request_of(0, [1] * (MAX_NEWS_BYTES // TOKEN_BYTES + 1))), True)
    assert plans.told == {0}


def test_distributions_are_handed_over_by_who_drew_them() -> None:
    workers = 3
    plans = DraftPlans("rejection", workers)
    requests = [request_of(slot, [1, 2], 0.8) for slot in range(5)]
    for request in requests:
        request.chain, request.entry, request.sampled_chain = [4], 7, True
    requests[1].chain, requests[1].entry = [], -1  # backed up by the first worker
    requests[2].sampled_chain = False  # of n-grams
    requests[3].key = NoiseKey(1, 0.0)
    step = step_of(*requests)
    seen: set[int] = set()
    for _ in range(4):
        numbers = plans.number_handovers(step, {1: 2})
        makers = {slot: maker(number, workers) for slot, number in numbers.items()}
        assert makers == {0: owner(0, 7, workers), 1: 0, 4: owner(4, 7, workers)}
        assert min(numbers.values()) > 0
        assert seen.isdisjoint(numbers.values())
        seen |= set(numbers.values())
    assert len(seen) == 12
    assert DraftPlans("shared_noise", workers).number_handovers(step, {1: 2}) == {}
