"""Several streams of answers as one of whole answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ipc.messages.client import Chunk
from ssd_pipe.cli.in_order import InOrder
from ssd_pipe.cli.talk import AnswerStream


class Script:
    """A stream that gives chunks and raises errors; knows whether it was cancelled."""

    def __init__(self, *steps: Chunk | BaseException) -> None:
        self._steps = iter(steps)
        self.cancelled = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        step = next(self._steps)
        if isinstance(step, BaseException):
            raise step
        return step

    def cancel(self) -> None:
        self.cancelled = True


def text(index: int, content: str) -> Chunk:
    return Chunk(id="", index=index, text=content)


def end(index: int) -> Chunk:
    return Chunk(id="", index=index, finish_reason="stop")


def submits(*streams: Script) -> tuple[list[Callable[[], AnswerStream]], list[Script]]:
    """What submits each of them, and those submitted so far."""
    begun: list[Script] = []

    def submit(stream: Script) -> AnswerStream:
        begun.append(stream)
        return stream

    return [partial(submit, stream) for stream in streams], begun


def test_answers_come_whole_and_in_order_however_they_are_mixed() -> None:
    first = Script(text(1, "c"), text(0, "a"), end(1), text(0, "b"), end(0))
    second = Script(end(0), text(1, "d"), end(1))
    asking, _ = submits(first, second)
    expected = [text(0, "a"), text(0, "b"), end(0), text(1, "c"), end(1)]
    expected += [end(0), text(1, "d"), end(1)]
    assert list(InOrder(asking, 2, ahead=2)) == expected


@pytest.mark.parametrize("ahead", [1, 2])
def test_no_more_is_asked_at_once_than_it_may(ahead: int) -> None:
    streams = [Script(text(0, "a"), end(0)) for _ in range(3)]
    asking, begun = submits(*streams)
    answers = InOrder(asking, 1, ahead)
    assert begun == []
    next(answers)
    assert begun == streams[:ahead]
    next(answers)
    next(answers)
    assert begun == streams[: ahead + 1]


def test_an_interrupt_loses_nothing_and_a_cancel_reaches_what_is_under_way() -> None:
    first = Script(text(0, "a"), KeyboardInterrupt(), text(0, "b"), end(0))
    second, third = Script(end(0)), Script(end(0))
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
