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

    The token that completes a stop text is the last one of the answer, and never among its first
    ``min_tokens``. With ``include_stop`` the stop text, or the stop token's, is part of the answer.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops, include_stop)
        self._watching = bool(stops)
        self._min_tokens = min_tokens
        self._count = 0
        self.include_stop = include_stop

    def push(self, ids: Sequence[int]) -> Piece:
        """Add ids in order."""
        if not self._watching:
            return Piece(self._detokenizer.push(ids), len(ids), False)
        shown = ""
        for used, token_id in enumerate(ids, start=1):
            self._count += 1
            text, stopped = self._stops.push(
                self._detokenizer.push([token_id]), self._count > self._min_tokens
            )
            shown += text
            if stopped:
                return Piece(shown, used, True)
        return Piece(shown, len(ids), False)

    def finish(self) -> Piece:
        """The rest of the text; a stop text may still be found in it."""
        text, stopped = self._stops.push(self._detokenizer.finish(), self._count > self._min_tokens)
        return Piece(text if stopped else text + self._stops.finish(), 0, stopped)
