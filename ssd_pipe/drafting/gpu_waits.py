"""Waits for the GPU that end when an outcome interrupts them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ssd_pipe.errors import ResourceError

STUCK = 60.0  # seconds a pass, or a step of the tree, may take


def wait_until(done: Callable[[], bool], interrupted: Callable[[], bool] = lambda: False) -> bool:
    """Wait for the GPU; False if interrupted. Raises ResourceError."""
    deadline = time.monotonic() + STUCK
    while not done():
        if interrupted():
            return False
        if time.monotonic() > deadline:
            raise ResourceError(f"no tokens from the GPU within {STUCK:.0f} s")
    return True


def wait_for_tokens(
    published: np.ndarray, where: np.ndarray, interrupted: Callable[[], bool]
) -> np.ndarray | None:
    """The tokens of one depth, once all have arrived; each is one aligned 8-byte store.

    None if interrupted before. Raises ResourceError.
    """
    if not wait_until(lambda: bool(published[where].min() >= 0), interrupted):
        return None
    return published[where]
