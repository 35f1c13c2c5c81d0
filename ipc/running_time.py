"""Time as a loop sees it that judges others by their silence."""

from __future__ import annotations

import time


class RunningTime:
    """A clock that only goes while its loop turns; it is read in every turn.

    A machine that is paused, or that gives this process no time, has not let its peers answer
    either: however long a turn takes, it counts as two at most.

    Attributes:
        now: seconds at the last ``read``, from 0.
    """

    def __init__(self, turn: float) -> None:
        """``turn``: most seconds between two reads when all is well."""
        self.now = 0.0
        self._most = 2 * turn
        self._last = time.monotonic()

    def read(self) -> float:
        """Seconds since it was made, less the pauses."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, self._most)
        return self.now
