"""Several streams of answers as one of whole answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ipc.messages.client import Chunk
from ssd_pipe.cli.in_order import InOrder
from ssd_pipe.cli.talk import AnswerStream
from ssd_pipe.errors import RequestError
from tests.cli.scripted import Scripted


def text(index: int, content: str) -> Chunk:
    return Chunk(id="", index=index, text=content)


def end(index: int) -> Chunk:
    return Chunk(id="", index=index, finish_reason="stop")


def submits(*streams: Scripted) -> tuple[list[Callable[[], AnswerStream]], list[Scripted]]:
    """What submits each of them, and those submitted so far."""
    begun: list[Scripted] = []

    def submit(stream: Scripted) -> AnswerStream:
        begun.append(stream)
        return stream

    return [partial(submit, stream) for stream in streams], begun


def test_answers_come_whole_and_in_order_however_they_are_mixed() -> None:
    first = Scripted(text(1, "c"), text(0, "a"), end(1), text(0, "b"), end(0))
    second = Scripted(end(0), text(1, "d"), end(1))
    asking, _ = submits(first, second)
    expected = [text(0, "a"), text(0, "b"), end(0), text(1, "c"), end(1)]
    expected += [end(0), text(1, "d"), end(1)]
    assert list(InOrder(asking, 2, ahead=2)) == expected


@pytest.mark.parametrize("ahead", [1, 2])
def test_no_more_is_asked_at_once_than_it_may(ahead: int) -> None:
    streams = [Scripted(text(0, "a"), end(0)) for _ in range(3)]
    asking, begun = submits(*streams)
    answers = InOrder(asking, 1, ahead)
    assert begun == []
    next(answers)
    assert begun == streams[:ahead]
    next(answers)
    next(answers)
    assert begun == streams[: ahead + 1]


def test_an_interrupt_loses_nothing_and_a_cancel_reaches_what_is_under_way() -> None:
    first = Scripted(text(0, "a"), KeyboardInterrupt(), text(0, "b"), end(0))
    second, third = Scripted(end(0)), Scripted(end(0))
    asking, begun = submits(first, second, third)
    answers = InOrder(asking, 1, ahead=2)
    assert next(answers) == text(0, "a")
    with pytest.raises(KeyboardInterrupt):
        next(answers)
    answers.cancel()
    assert answers.cancelled
    assert first.cancelled
    assert second.cancelled
    assert list(answers) == [text(0, "b"), end(0), end(0)]
    assert begun == [first, second]


FULL = RequestError(429, "the waiting line is full")


def several(*tries: list[Scripted]) -> tuple[list[Callable[[], AnswerStream]], list[int]]:
    """What submits the prompts, each time with the next of its streams; and which it was."""
    begun: list[int] = []

    def submit(number: int, left: Iterator[Scripted]) -> AnswerStream:
        begun.append(number)
        return next(left)

    return [partial(submit, i, iter(each)) for i, each in enumerate(tries)], begun


def answer(content: str) -> Scripted:
    return Scripted(text(0, content), end(0))


def test_what_does_not_fit_is_asked_again_after_those_under_way() -> None:
    asking, begun = several(
        [answer("a")],
        [Scripted(FULL), answer("b")],
        [Scripted(FULL), Scripted(FULL), answer("c")],
        [answer("d")],
    )
    got = list(InOrder(asking, 1, ahead=3))
    assert "".join(chunk.text for chunk in got) == "abcd"
    assert begun == [0, 1, 2, 3, 1, 2, 2]


def test_what_came_of_a_prompt_that_is_asked_again_is_forgotten() -> None:
    half = Scripted(text(1, "x"), end(1), FULL)
    whole = Scripted(text(1, "d"), end(1), text(0, "c"), end(0))
    asking, _ = several([Scripted(text(0, "a"), end(0), text(1, "b"), end(1))], [half, whole])
    got = list(InOrder(asking, 2, ahead=2))
    assert "".join(chunk.text for chunk in got) == "abcd"
    assert [chunk.index for chunk in got if chunk.finish_reason] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "tries", [[[Scripted(FULL)]], [[answer("a")], [Scripted(FULL), Scripted(FULL)]]]
)
def test_a_line_that_others_fill_is_an_error(tries: list[list[Scripted]]) -> None:
    asking, _ = several(*tries)
    answers = InOrder(asking, 1, ahead=2)
    with pytest.raises(RequestError, match="line is full"):
        list(answers)


def test_another_s_error_waits_for_its_turn() -> None:
    asking, begun = several(
        [answer("a")], [Scripted(FULL), answer("b")], [Scripted(RequestError(400, "too long"))]
    )
    answers = InOrder(asking, 1, ahead=3)
    assert [next(answers) for _ in range(4)] == [text(0, "a"), end(0), text(0, "b"), end(0)]
    with pytest.raises(RequestError, match="too long"):
        next(answers)
    assert begun == [0, 1, 2, 1]


def test_a_cancel_leaves_out_what_did_not_fit() -> None:
    under_way = Scripted(KeyboardInterrupt(), end(0))
    asking, begun = several([answer("a")], [Scripted(FULL)], [under_way])
    answers = InOrder(asking, 1, ahead=3)
    assert [next(answers), next(answers)] == [text(0, "a"), end(0)]
    with pytest.raises(KeyboardInterrupt):
        next(answers)
    answers.cancel()
    assert under_way.cancelled
    assert next(answers, None) is None
    assert begun == [0, 1, 2]
