"""Stop texts: end an answer before the first of them, however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Watches a growing text for stop texts and holds back what could be the start of one.

    The match that is complete first wins (the longest, if several end together), so the outcome
    does not depend on how the text was cut. The stop text is given out only if it is to be
    ``included``.

    Attributes:
        stopped: the text that matched, None before.
    """

    def __init__(self, stops: Iterable[str], included: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._included = included
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str, watch: bool = True) -> tuple[str, bool]:
        """Add text; returns (text that may be given out, whether a stop text was found).

        Without ``watch`` no stop text can end in this piece. After a stop, everything pushed is
        swallowed.
        """
        if self.stopped is not None:
            return "", True
        buffer = self._held + text
        old = len(self._held)
        found = [
            (at + len(stop), at, stop)
            for stop in (self._stops if watch else ())
            if (at := buffer.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if found:
            end, start, self.stopped = min(found)
            self._held = ""
            return buffer[: end if self._included else start], True
        keep = self._possible_start(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def finish(self) -> str:
        """What was held back and turned out to be no stop text."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that begins some stop text."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
