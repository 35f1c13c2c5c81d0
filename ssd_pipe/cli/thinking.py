"""How a terminal shows what a model thinks before it answers: dimmed.

Servers that take it out of the answer send it as ``reasoning_content``; elsewhere it is what stands
between two marks at the beginning of the text (see ``ssd_pipe.text.thinking``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from ipc.messages.client import Chunk
from ssd_pipe.cli.speculation import RESET, colours_wanted
from ssd_pipe.text.thinking import BEGIN, END

DIM = "\x1b[2m"

Paint = Callable[[Chunk], str]


def painter() -> Paint | None:
    """What to print of each chunk of one answer; None, its text alone, where nobody watches.

    Where colours are not wanted (https://no-color.org) thoughts stand between the two marks.
    """
    if colours_wanted():
        return Dimmed()
    return Marked() if sys.stdout.isatty() else None


class Marked:
    """Thoughts that a server sends apart, between marks; the text as it is."""

    begin, end = f"{BEGIN}\n", f"\n{END}\n\n"

    def __init__(self) -> None:
        self._apart = False  # thoughts that came apart have begun and not ended

    def __call__(self, chunk: Chunk) -> str:
        reasoning = getattr(chunk, "reasoning", "")
        parts = []
        if reasoning:
            parts.append(("" if self._apart else self.begin) + self._thought(reasoning))
            self._apart = True
        if self._apart and (chunk.text or chunk.finish_reason):
            parts.append(self.end)
            self._apart = False
        parts.append(self._answer(chunk))
        return "".join(parts)

    def _thought(self, text: str) -> str:
        return text

    def _answer(self, chunk: Chunk) -> str:
        return chunk.text


class Dimmed(Marked):
    """Thoughts dimmed, however they come. Each piece ends the colour: it may be the last one."""

    begin, end = "", "\n\n"

    def __init__(self) -> None:
        super().__init__()
        self._head: str | None = ""  # the text's beginning, until one sees whether it is a thought
        self._inside = False
        self._tail = ""  # of a thought, as long as a mark of its end may have begun in it

    def _thought(self, text: str) -> str:
        return f"{DIM}{text}{RESET}" if text else ""

    def _answer(self, chunk: Chunk) -> str:
        text = chunk.text
        if chunk.thinking:
            self._head, self._inside = None, True
        if self._head is not None:
            self._head += text
            head = self._head.lstrip()
            self._inside = head.startswith(BEGIN)
            if self._inside or not BEGIN.startswith(head):
                self._head = None
        if not self._inside:
            return text
        seen = self._tail + text
        at = seen.find(END)
        if at < 0:
            self._tail = seen[-len(END) + 1 :]
            return self._thought(text)
        self._inside = False
        kept = at + len(END) - len(self._tail)
        return self._thought(text[:kept]) + text[kept:]
