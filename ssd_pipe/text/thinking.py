"""What a model thinks before it answers: the beginning of its text, to ``</think>``.

The mark before it, ``<think>``, is the model's own, or ends the prompt where the chat template puts
it there.
"""

from __future__ import annotations

from typing import NamedTuple

BEGIN, END = "<think>", "</think>"


def is_open(text: str) -> bool:
    """Whether a thought begins in ``text`` and does not end in it."""
    return BEGIN in text and END not in text.rpartition(BEGIN)[2]


class Said(NamedTuple):
    """New text of an answer, in its two parts."""

    reasoning: str
    content: str

    def then(self, later: Said) -> Said:
        """Both together."""
        return Said(self.reasoning + later.reasoning, self.content + later.content)


class ThoughtSplitter:
    """Takes one answer apart as it comes. Marks are left out, and white space beside them.

    Text is held back as long as it may be part of a mark, or white space before one.

    Args:
        begun: the prompt ended in the mark of the beginning.
    """

    def __init__(self, begun: bool) -> None:
        self._held = ""
        self._undecided = not begun  # whether the text begins with a thought
        self._inside = begun
        self._fresh = True  # white space here is beside a mark

    def push(self, text: str) -> Said:
        """Add text; returns what can be told of it and of what was held back."""
        self._held += text
        if self._undecided:
            head = self._held.lstrip()
            if head != BEGIN and BEGIN.startswith(head):
                return Said("", "")
            self._undecided = False
            self._inside = head.startswith(BEGIN)
            if self._inside:
                self._held = head.removeprefix(BEGIN)
            else:
                self._fresh = False
        thought = ""
        if self._inside:
            thought, mark, rest = self._held.partition(END)
            if mark:
                thought, self._held = self._trimmed(thought).rstrip(), rest
                self._inside, self._fresh = False, True
            else:
                known = len(thought) - _open_end(thought)
                thought, self._held = self._trimmed(thought[:known]), thought[known:]
                return Said(thought, "")
        content, self._held = self._trimmed(self._held), ""
        return Said(thought, content)

    def finish(self) -> Said:
        """What is still held back."""
        text, self._held = self._held, ""
        if self._inside:
            return Said(self._trimmed(text).rstrip(), "")
        return Said("", text)

    def _trimmed(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text


def _open_end(text: str) -> int:
    """Length of the end of ``text`` that may be a mark's beginning, or white space before it."""
    marked = next((n for n in range(len(END) - 1, 0, -1) if text.endswith(END[:n])), 0)
    before = text[: len(text) - marked]
    return marked + len(before) - len(before.rstrip())
