"""When to wait, when to verify, and how far to draft: online estimates and the decisions on them.

Times are seconds throughout. Acceptance is the chance a draft token is accepted given that all
before it were.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from ssd_pipe.errors import ConfigError

VerifyTime = float | Callable[[int], float]
"""Time of a verification: a constant, or a function of the number of tokens fed."""

# ---------------------------------------------------------------------------- estimators

PRIOR, STRENGTH = 0.7, 4.0
"""Acceptance before anything was judged; it counts as so many tokens."""
KEEP = 0.98
"""What past rounds' acceptance weighs when a round comes."""


class Ema:
    """Exponential moving average whose first values count fully (no pull towards zero)."""

    def __init__(self, decay: float = 0.9) -> None:
        """``decay`` in [0, 1): weight that a value keeps when the next one comes."""
        if not 0 <= decay < 1:
            raise ConfigError("decay", f"must be in [0, 1), got {decay!r}")
        self._decay = decay
        self._sum = 0.0
        self._weight = 0.0

    def observe(self, value: float) -> None:
        self._sum = self._decay * self._sum + value
        self._weight = self._decay * self._weight + 1

    def value(self, default: float) -> float:
        """The average, or ``default`` before the first value."""
        return self._sum / self._weight if self._weight else default


class AcceptanceEstimator:
    """Acceptance per position and overall, from the outcomes of rounds."""

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ConfigError("speculation.k", f"must be at least 1, got {k}")
        self._accepted = [0.0] * k
        self._judged = [0.0] * k
        self._positions: list[float] = []

    def observe(self, accepted: int, chain: int) -> None:
        """A round took ``accepted`` of ``chain`` draft tokens; the first one refused ended it."""
        judged = min(accepted + 1, chain)
        self._accepted = [n * KEEP + (j < accepted) for j, n in enumerate(self._accepted)]
        self._judged = [n * KEEP + (j < judged) for j, n in enumerate(self._judged)]
        self._positions = []

    @property
    def overall(self) -> float:
        """a, pooled over positions."""
        return (sum(self._accepted) + PRIOR * STRENGTH) / (sum(self._judged) + STRENGTH)

    def per_position(self) -> list[float]:
        """a_j for j = 0..k-1; positions seldom reached lean on the overall value."""
        if not self._positions:
            lean = STRENGTH * self.overall
            self._positions = [
                (accepted + lean) / (judged + STRENGTH)
                for accepted, judged in zip(self._accepted, self._judged, strict=True)
            ]
        return self._positions


class StageTimes:
    """Moving averages of how long each stage takes; verification by number of tokens fed."""

    def __init__(self) -> None:
        self._verify: dict[int, Ema] = {}
        self._counts: list[int] = []  # keys of _verify, rising
        self._stages: dict[str, Ema] = {}

    def observe_verify(self, tokens: int, seconds: float) -> None:
        if tokens not in self._verify:
            self._verify[tokens] = Ema()
            self._counts = sorted(self._verify)
        self._verify[tokens].observe(seconds)

    def verify(self, tokens: int, extrapolate: bool = False) -> float:
        """Time for ``tokens``, 0 before any was seen; between counts seen it is interpolated.

        Beyond the largest count it is flat, or with ``extrapolate`` it grows as it did from the
        largest count not over half of that one.
        """
        seen = self._verify.get(tokens)
        if seen is not None:
            return seen.value(0.0)
        counts = self._counts
        if not counts:
            return 0.0
        at = bisect_left(counts, tokens)
        low, high = counts[max(at - 1, 0)], counts[min(at, len(counts) - 1)]
        below = self._verify[low].value(0.0)
        if low != high:
            above = self._verify[high].value(0.0)
            return below + (above - below) * (tokens - low) / (high - low)
        half = bisect_right(counts, low // 2) - 1
        if not extrapolate or tokens < low or half < 0:
            return below
        slope = (below - self._verify[counts[half]].value(0.0)) / (low - counts[half])
        return below + max(0.0, slope) * (tokens - low)

    def observe(self, stage: str, seconds: float) -> None:
        """``stage`` is any name: "draft_step", "glue", ..."""
        self._stages.setdefault(stage, Ema()).observe(seconds)

    def time(self, stage: str) -> float:
        """0 for a stage that was not seen yet."""
        ema = self._stages.get(stage)
        return ema.value(0.0) if ema else 0.0


# ---------------------------------------------------------------------------- decisions


def expected_tokens(a: float | Sequence[float], depth: int) -> float:
    """Tokens a verification of ``depth`` draft tokens emits on average, its own one included.

    Args:
        a: acceptance, one number or one per position (at least ``depth`` of them).
    """
    expected, reach = 1.0, 1.0
    for j in range(depth):
        reach *= a if isinstance(a, float | int) else a[j]
        expected += reach
    return expected


def worth_waiting(
    a: float | Sequence[float], depth_ready: int, verify_time: VerifyTime, step_time: float
) -> bool:
    """Whether one more draft token, ``step_time`` from now, raises expected tokens per second.

    Never for more tokens than ``a`` has positions.
    """
    if not isinstance(a, float | int) and depth_ready >= len(a):
        return False
    now = expected_tokens(a, depth_ready) / _verify(verify_time, depth_ready + 1)
    later_time = step_time + _verify(verify_time, depth_ready + 2)
    return expected_tokens(a, depth_ready + 1) / later_time > now


def best_chain_length(
    a: float | Sequence[float],
    verify_time: VerifyTime,
    glue_time: float,
    step_time: float,
    k_max: int,
) -> int:
    """Draft tokens that give the most tokens per second when the target waits for them.

    The first token costs the ``glue_time`` of the pass over what the draft has not seen, each
    further one ``step_time``. 0 says: do not speculate. Ties go to the shorter chain.
    """
    limit = k_max if isinstance(a, float | int) else min(k_max, len(a))

    def rate(k: int) -> float:
        drafting = glue_time + (k - 1) * step_time if k else 0.0
        return expected_tokens(a, k) / (drafting + _verify(verify_time, k + 1))

    return max(range(limit + 1), key=rate)


def _verify(verify_time: VerifyTime, tokens: int) -> float:
    return verify_time(tokens) if callable(verify_time) else verify_time
