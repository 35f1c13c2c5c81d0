"""The scheduler follows a target that goes ahead, whatever comes in between."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ipc.messages.requests import AbortRequest, AddRequest, SchedulerStats, StatsRequest
from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Ahead, Found
from procs import waiting
from procs.admission import make_scheduler
from procs.going_ahead import going_ahead
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.step import Step
from tests.procs.conftest import Opened
from tests.procs.scheduler_process import BLOCKS, OTHER, PROMPT, SIZES, K, settings
from tests.waiting import WAIT, wait_for


def rids(step: Step) -> list[int]:
    return [row.request.rid for row in step.rows]


ALONE = [Found([], -1)]
"""What a target that decodes one row without a draft says when it goes on."""


def test_a_step_that_the_target_began_is_followed(open_process: Opened) -> None:
    process = open_process()
    step: Step | None = process.decoding()
    for count in range(2, 8):
        process.target.answer(step, ALONE)
        following = process.end(step)
        assert following is not None
        assert following.number == step.number + 1
        [leave] = process.target.hear()
        assert leave.after == following.number
        process.check(count)
        step = following
    process.target.answer(step)
    assert process.end(step) is None
    process.start()
    process.check(8)


def test_mail_withdraws_leave_while_the_step_runs(
    open_process: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: not when the scheduler looks at its peers again."""
    monkeypatch.setattr(waiting, "PEER_POLL", 2 * WAIT)
    process = open_process()
    step = process.decoding()
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(process.end, step)
        process.post(AddRequest(2, OTHER, 4, NoiseKey(), [], 0))
        assert process.target.inbox.recv(WAIT) == Ahead(step.number)
        process.target.answer(step)
        assert ending.result(WAIT) is None
    assert rids(process.start()) == [1, 2]
    process.check(2)


def test_mail_that_comes_when_the_target_has_gone_on_waits_for_that_step(
    open_process: Opened,
) -> None:
    process = open_process()
    step = process.decoding()
    process.target.answer(step, ALONE)
    process.mail(AddRequest(2, OTHER, 4, NoiseKey(), [], 0))
    process.ahead.see_to_mail()
    following = process.end(step)
    assert following is not None
    assert rids(following) == [1]
    assert process.target.hear() == [Ahead(step.number)]  # too late, and no leave for another
    process.check(2)
    process.target.answer(following)
    assert process.end(following) is None
    assert rids(process.start()) == [1, 2]
    process.check(3)


def test_an_abort_that_comes_when_the_target_has_gone_on_ends_the_request_after_that_step(
    open_process: Opened,
) -> None:
    process = open_process()
    step = process.decoding()
    process.target.answer(step, ALONE)
    process.mail(AbortRequest(1))
    following = process.end(step)
    assert following is not None
    process.check(2)
    process.target.answer(following)
    assert process.end(following) is None
    process.desk.attend()
    assert not process.scheduler.has_work
    assert process.scheduler.blocks.num_free == BLOCKS


def test_leave_is_withdrawn_once(open_process: Opened) -> None:
    process = open_process()
    step = process.decoding()
    process.ahead.see_to_mail()
    assert process.target.hear() == []
    for rid in (2, 3):
        process.mail(AbortRequest(rid))  # of requests that nobody knows
        process.ahead.see_to_mail()
        process.ahead.see_to_mail()
    assert process.target.hear() == [Ahead(step.number)]
    process.target.answer(step)
    assert process.end(step) is None
    # The next leave stands on its own, and ends as the first one did.
    step = process.start()
    [plan, leave] = process.target.hear()
    assert leave.after == plan.step == step.number
    assert leave.rows
    process.mail(AbortRequest(2))
    process.ahead.see_to_mail()
    process.ahead.see_to_mail()
    assert process.target.hear() == [Ahead(step.number)]


def test_a_question_is_answered_and_leaves_the_leave(open_process: Opened) -> None:
    process = open_process()
    step = process.decoding()
    process.mail(StatsRequest(9))
    process.ahead.see_to_mail()
    answer = process.told()
    assert isinstance(answer, SchedulerStats)
    assert answer.token == 9
    assert process.target.hear() == []
    process.target.answer(step, ALONE)
    assert process.end(step) is not None


def test_leave_that_was_not_taken_is_over(open_process: Opened) -> None:
    """The blocks that it brought are told again, with the plan that comes instead."""
    process = open_process()
    step = process.decoding()
    while not process.target.leave.rows[0].blocks:
        process.target.answer(step)
        assert process.end(step) is None
        step = process.start()
        process.target.hear()
    [offered] = process.target.leave.rows
    process.target.answer(step)
    assert process.end(step) is None
    process.desk.attend()
    planned = process.start()
    plan = process.target.hear()[0]
    assert plan.step == planned.number == step.number + 1
    assert plan.rows[0].blocks == offered.blocks
    process.check(len(planned.rows[0].request.tokens) - len(PROMPT))


def test_a_draft_that_is_lost_when_the_target_has_gone_on_costs_nothing_but_speed(
    open_process: Opened,
) -> None:
    """The chain that the target took from the cache is judged; then rows decode alone."""
    process = open_process("ssd")
    step = process.decoding()
    chain = [process.world.target(1, len(PROMPT) + 2 + i) for i in range(2)]
    process.target.answer(step, [Found(chain, 0)])
    process.mate.link.failed("out of memory")
    wait_for(lambda: not process.draft.usable)
    following = process.end(step)
    assert following is not None
    assert following.rows[0].request.chain == chain
    assert process.target.hear() == []  # the draft is to be looked for before any other step
    process.target.answer(following)
    assert process.end(following) is None
    process.check(5)
    process.draft.look(process.planner, process.scheduler.running)
    assert process.draft.trouble == "draft: out of memory"
    alone = process.start()
    [plan] = process.target.hear()
    assert [row.chain for row in plan.rows] == [0]
    process.target.answer(alone)
    assert process.end(alone) is None
    process.check(6)


@pytest.mark.parametrize("found", [False, True])
def test_a_draft_that_was_missed_for_a_moment_is_asked_before_there_is_leave_again(
    open_process: Opened, found: bool
) -> None:
    process = open_process("ssd")
    step = process.decoding()
    process.target.answer(step, [Found([2], 0)] if found else None)
    process.draft.missed("branches")
    following = process.end(step)
    assert (following is not None) is found
    if following is not None:
        process.target.answer(following)
        assert process.end(following) is None
    assert process.target.hear() == []
    process.draft.look(process.planner, process.scheduler.running)
    process.mate.answer()
    wait_for(process.drafting)
    process.start()
    [plan, leave] = process.target.hear()
    assert leave.after == plan.step
    assert leave.k == K


@pytest.mark.parametrize(
    ("more", "given"),
    [
        ({"mode": "ar"}, True),
        ({"mode": "ssd"}, True),
        ({"mode": "ar", "target": {"tp": 2}}, False),
        ({"mode": "ssd", "speculation": {"synthetic_acceptance": "0.7"}}, False),
    ],
)
def test_where_a_target_may_go_ahead(more: dict[str, Any], given: bool) -> None:
    config = settings(**more)
    planner = RoundPlanner(config.mode, config.speculation, None)
    found = going_ahead(config, make_scheduler(config, SIZES, BLOCKS), planner)
    assert (found is not None) is given
