"""Waiting for what other processes do, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT = 30.0  # seconds
PAUSE = 0.01  # seconds; some conditions ask a whole pipeline


def wait_for(
    condition: Callable[[], bool],
    seconds: float = WAIT,
    otherwise: Callable[[], object] = lambda: "did not happen in time",
) -> None:
    """Until the condition holds; an AssertionError with ``otherwise`` if that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(PAUSE)
