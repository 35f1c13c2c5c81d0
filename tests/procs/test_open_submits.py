"""Which Submits are open, and which of their requests the scheduler still works on."""

from __future__ import annotations

import asyncio

from procs.open_request import OpenRequest
from procs.open_submits import Group, Key, OpenSubmits
from ssd_pipe.text.answer import AnswerText
from ssd_pipe.text.detokenizer import DetokenizerFactory
from tests.text.vocabularies import byte_level

A: Key = (b"one", "a")


def opened(submits: OpenSubmits, key: Key, *rids: int) -> Group:
    group = submits.begin(key, len(rids))
    assert group is not None
    for rid in rids:
        answer = AnswerText(DetokenizerFactory(byte_level()).new(), [], False, 0)
        submits.add(group, OpenRequest(*key, rid, answer, 3, 0, False))
    return group


def test_a_name_is_free_again_after_the_last_answer() -> None:
    submits = OpenSubmits()
    group = opened(submits, A, 1, 2)
    assert submits.begin(A, 1) is None
    assert submits.begin((b"two", "a"), 1) is not None
    for left, request in enumerate(submits.requests_of(group)):
        assert submits.request(request.rid) is request
        assert len(submits) == 2
        submits.end(request)
        assert submits.request(request.rid) is None
        assert (submits.get(A) is None) == bool(left)
    assert submits.begin(A, 1) is not None


def test_closing_tells_what_is_still_to_be_aborted() -> None:
    submits = OpenSubmits()
    group = opened(submits, A, 1, 2, 3, 4)
    submits.end(submits.requests_of(group)[0])
    assert submits.lose(3) == A
    assert submits.close(A) == [2, 4]
    assert submits.lose(2) is None
    assert not list(submits)


def test_all_of_one_client() -> None:
    submits = OpenSubmits()
    opened(submits, A, 1)
    opened(submits, (b"one", "b"), 2)
    opened(submits, (b"two", "a"), 3)
    assert submits.of_client(b"one") == [A, (b"one", "b")]
    assert submits.of_client(b"three") == []


async def test_whatever_ends_a_submit_ends_its_deadline() -> None:
    submits = OpenSubmits()
    for at_once in (False, True):
        group = opened(submits, A, 1)
        group.deadline = asyncio.get_running_loop().call_later(600, lambda: None)
        if at_once:
            submits.close(A)
        else:
            submits.end(*submits.requests_of(group))
        assert group.deadline.cancelled()
