"""One answer's way from token ids to text: detokenizer, then stop texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ssd_pipe.text.detokenizer import Detokenizer
from ssd_pipe.text.stops import StopMatcher


class Piece(NamedTuple):
    """New text; how many of the pushed ids belong to the answer; whether a stop text ended it."""

    text: str
    used: int
    stopped: bool


class AnswerText:
    """Turns pushed token ids into text that may be shown.

    The token that completes a stop text is the last one of the answer.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._watching = bool(stops)

    def push(self, ids: Sequence[int]) -> Piece:
        """Add ids in order."""
        if not self._watching:
            return Piece(self._detokenizer.push(ids), len(ids), False)
        shown = ""
        for used, token_id in enumerate(ids, start=1):
            text, stopped = self._stops.push(self._detokenizer.push([token_id]))
            shown += text
            if stopped:
                return Piece(shown, used, True)
        return Piece(shown, len(ids), False)

    def finish(self) -> Piece:
        """The rest of the text; a stop text may still be found in it."""
        text, stopped = self._stops.push(self._detokenizer.finish())
        return Piece(text if stopped else text + self._stops.finish(), 0, stopped)
