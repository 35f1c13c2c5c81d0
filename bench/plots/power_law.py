"""The power law of the miss rate, and the fan-out it implies.

Kumar, Dao, May (arXiv 2603.03251) take the chance that an outcome is not among the F
speculated ones to fall as F^-r; with r and the acceptance, Theorem 12 splits a budget over accepted
lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ssd_pipe.engine.fanout import geometric

LEAST_POINTS = 3


class Fit(msgspec.Struct, frozen=True):
    """``scale`` F^-``exponent``; ``error`` is the standard error of the exponent."""

    scale: float
    exponent: float
    error: float

    def at(self, fan_out: float) -> float:
        """Miss rate."""
        return float(self.scale * fan_out**-self.exponent)


def fit(fan_outs: Sequence[float], misses: Sequence[float]) -> Fit | None:
    """Least squares on logarithms; None for fewer than three fan-outs with a miss rate above 0."""
    pairs = [(f, m) for f, m in zip(fan_outs, misses, strict=True) if f > 0 and m > 0]
    if len({f for f, _ in pairs}) < LEAST_POINTS:
        return None
    x, y = (np.log([pair[i] for pair in pairs]) for i in (0, 1))
    slope, offset = np.polyfit(x, y, 1)
    rest = y - (offset + slope * x)
    spread = ((x - x.mean()) ** 2).sum()
    error = np.sqrt((rest**2).sum() / max(1, len(x) - 2) / spread)
    return Fit(float(np.exp(offset)), float(-slope), float(error))


def implied(found: Fit, acceptance: float, k: int, budget: int) -> list[int] | None:
    """Theorem 12's branches for accepted lengths 0..k; None where misses do not fall with F."""
    return geometric(budget, k, acceptance, found.exponent) if found.exponent > 0 else None
