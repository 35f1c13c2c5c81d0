"""Stop texts: end an answer before the first of them, however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Watches a growing text for stop texts and holds back what could be the start of one.

    The match that is complete first wins (the longest, if several end together), so the outcome
    does not depend on how the text was cut. The stop text is never given out.

    Attributes:
        stopped: the text that matched, None before.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns (text that may be given out, whether a stop text was found).

        After a stop, everything pushed is swallowed.
        """
        if self.stopped is not None:
            return "", True
        buffer = self._held + text
        found = [
            (at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0
        ]
        if found:
            _, start, self.stopped = min(found)
            self._held = ""
            return buffer[:start], True
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
