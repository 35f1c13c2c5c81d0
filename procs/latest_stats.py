"""What the scheduler has last said of itself, asked for when somebody wants to know."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from ipc.messages.requests import SchedulerStats

STATS_WAIT = 1.0  # seconds the scheduler may take before its last known state is given out


class LatestStats:
    """To be used on one event loop.

    Args:
        ask: sends the question to the scheduler.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._known: SchedulerStats | None = None
        self._at = 0.0
        self._coming: asyncio.Future[SchedulerStats] | None = None

    def take(self, stats: SchedulerStats) -> None:
        """The scheduler has answered."""
        self._known, self._at = stats, time.monotonic()
        if self._coming is not None:
            self._coming.set_result(stats)
            self._coming = None

    @property
    def age(self) -> float:
        """Seconds since the last answer, -1 before the first."""
        return time.monotonic() - self._at if self._known is not None else -1.0

    async def fresh(self) -> SchedulerStats | None:
        """The scheduler's state; after STATS_WAIT the last known one. Askers share one question."""
        if self._coming is None:
            self._coming = asyncio.get_running_loop().create_future()
            self._ask()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._coming), STATS_WAIT)
        return self._known
