"""Thoughts apart from answers, however the text is cut."""

from __future__ import annotations

import pytest

from ssd_pipe.text.thinking import Said, ThoughtSplitter


def split(text: str, size: int, begun: bool = False) -> Said:
    splitter, said = ThoughtSplitter(begun), Said("", "")
    for at in range(0, len(text), size):
        said = said.then(splitter.push(text[at : at + size]))
    return said.then(splitter.finish())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "content"),
    [
        ("<think>\nhm \n\nso\n</think>\n\nan answer\n", False, "hm \n\nso", "an answer\n"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("\nhm</think>\n\nb", True, "hm", "b"),
        ("<think>hm", False, "hm", ""),
        ("<think>a < b, </thin> </\n", False, "a < b, </thin> </", ""),
        ("<think>\n\n</think>\n\nb", False, "", "b"),
        (" plain <think>x</think>", False, "", " plain <think>x</think>"),
        ("<thi", False, "", "<thi"),
        ("<think>", False, "", ""),
        ("\n<think>\n", False, "", ""),
        ("\n", False, "", "\n"),
        ("", False, "", ""),
        ("hm", True, "hm", ""),
        ("</think>b</think>", True, "", "b</think>"),
    ],
)
def test_both_parts_come_without_marks(
    text: str, begun: bool, reasoning: str, content: str, size: int
) -> None:
    assert split(text, size, begun) == (reasoning, content)


def test_text_is_told_as_soon_as_it_can_be() -> None:
    splitter = ThoughtSplitter(False)
    assert splitter.push("<think>a b ") == ("a b", "")
    assert splitter.push("c</th") == (" c", "")
    assert splitter.push("e </think>") == ("</the", "")
    assert splitter.push(" d ") == ("", "d ")
    assert splitter.push(" e") == ("", " e")
    assert ThoughtSplitter(False).push("d") == ("", "d")
