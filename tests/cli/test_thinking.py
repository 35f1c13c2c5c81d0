"""What a model thinks is dimmed, however it comes and however it is cut."""

from __future__ import annotations

import pytest

from ssd_pipe.cli.speculation import RESET
from ssd_pipe.cli.thinking import DIM, Dimmed, Marked, Paint
from ssd_pipe.server_stream import ServerChunk


def painted(paint: Paint, *pieces: tuple[str, str]) -> str:
    """Of pieces of thought and of text, and an end."""
    chunks = [ServerChunk(id="", reasoning=thought, text=text) for thought, text in pieces]
    return "".join(map(paint, [*chunks, ServerChunk(id="", finish_reason="stop")]))


def merged(text: str) -> str:
    """Without the ends of colours that begin again at once."""
    return text.replace(f"{RESET}{DIM}", "")


def test_thoughts_that_come_apart() -> None:
    pieces = [("a", ""), ("b", ""), ("", "c"), ("", "d")]
    assert merged(painted(Dimmed(), *pieces)) == f"{DIM}ab{RESET}\n\ncd"
    assert painted(Marked(), *pieces) == "<think>\nab\n</think>\n\ncd"
    assert painted(Marked(), ("a", "")) == "<think>\na\n</think>\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("blank", ["", "\n"])
def test_thoughts_between_marks_in_the_text(size: int, blank: str) -> None:
    text = f"{blank}<think>\n1 < 2, </thin\n</think>\n\nan answer with </think> and <think>"
    pieces = [("", text[at : at + size]) for at in range(0, len(text), size)]
    seen = merged(painted(Dimmed(), *pieces))
    dim, _, rest = seen.partition(RESET)
    assert rest == "\n\nan answer with </think> and <think>"
    # The mark of the beginning is known as one only when it is there as a whole.
    assert dim.replace(DIM, "") == f"{blank}<think>\n1 < 2, </thin\n</think>"
    assert 0 <= dim.index(DIM) < len(f"{blank}<think>")
    assert painted(Marked(), *pieces) == text


@pytest.mark.parametrize("text", ["", "plain", "<thin ice", "first <think>x</think>"])
def test_what_does_not_begin_with_a_thought_is_left_alone(text: str) -> None:
    assert painted(Dimmed(), *[("", char) for char in text]) == text
