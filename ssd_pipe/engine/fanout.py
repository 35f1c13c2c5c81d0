"""Which outcomes of a verification to speculate on: fan-out allocation and branch selection.

Arithmetic follows Kumar, Dao, May (arXiv 2603.03251): Theorem 12 for the geometric fan-out. The
confidence-aware selection ranks this very round's outcomes by the draft's own probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ssd_pipe.errors import ConfigError

_MIN_MISS = 1e-6


def uniform(budget: int, k: int) -> list[int]:
    """Split ``budget`` evenly over accepted lengths 0..k; a remainder goes to the short ones."""
    _check(budget, k)
    share, rest = divmod(budget, k + 1)
    return [share + (i < rest) for i in range(k + 1)]


def geometric(budget: int, k: int, acceptance: float, exponent: float) -> list[int]:
    """Split ``budget`` by Theorem 12.

    F_i is proportional to a^(i/(1+r)) for i < k, and F_k to a^(k/(1+r)) (1-a)^(-1/(1+r)).

    Args:
        acceptance: a, chance that a draft token is accepted, in [0, 1].
        exponent: r > 0, power-law exponent of the miss rate.

    Returns:
        k + 1 counts that sum to ``budget``.
    """
    _check(budget, k)
    if not 0 <= acceptance <= 1:
        raise ConfigError("acceptance", f"must be in [0, 1], got {acceptance!r}")
    if not exponent > 0:
        raise ConfigError("exponent", f"must be above 0, got {exponent!r}")
    power = 1 / (1 + exponent)
    weights = [acceptance ** (i * power) for i in range(k + 1)]
    weights[k] *= max(1 - acceptance, _MIN_MISS) ** -power
    return _apportion(weights, budget)


def outcome_probabilities(
    candidate_weights: ArrayLike, chain_accept: ArrayLike
) -> NDArray[np.float64]:
    """Chance of each outcome (k, t): the product of a_j over j < k, times w_k(t).

    Args:
        candidate_weights: [K+1, n] w_k(t), the draft's probability of candidate t at position k.
        chain_accept: [K] a_j, the draft's probability of the chain's own token j.

    Returns:
        float64 [K+1, n].
    """
    weights = np.asarray(candidate_weights, dtype=np.float64)
    reach = np.ones(len(weights))
    np.asarray(chain_accept, dtype=np.float64).cumprod(out=reach[1:])
    return weights * reach[:, None]


def select_branches(
    candidate_tokens: ArrayLike,
    candidate_weights: ArrayLike,
    chain_accept: ArrayLike,
    counts: Sequence[int] | None,
    budget: int,
) -> list[tuple[int, int]]:
    """Outcomes of one round to speculate on.

    Args:
        candidate_tokens: [K+1, n] distinct candidate recovery tokens at each accepted length; the
            chain's own token is not among them for k < K. A negative id marks an unused place.
        candidate_weights: [K+1, n] w_k(t); they need not be sorted.
        chain_accept: [K] a_j.
        counts: K+1 counts: take the F_k heaviest candidates of each k. None: confidence-aware,
            take the ``budget`` most likely outcomes.
        budget: most branches returned; fewer come back if there are fewer candidates.

    Returns:
        (k, token) pairs, the likeliest outcome first; ties go to the smaller k, then to the
        earlier candidate.
    """
    tokens = np.asarray(candidate_tokens)
    n = tokens.shape[1]
    chances = outcome_probabilities(candidate_weights, chain_accept)
    has_unused = bool(tokens.min(initial=0) < 0)
    if has_unused:
        chances[tokens < 0] = -np.inf
    if counts is None:
        best = _most_likely(chances.ravel(), budget)
    else:
        if len(counts) != len(tokens):
            raise ConfigError("counts", f"need k + 1 = {len(tokens)}, got {len(counts)}")
        weights = np.array(candidate_weights, dtype=np.float64)
        if has_unused:
            weights[tokens < 0] = -np.inf
        order = (-weights).argsort(axis=1, kind="stable")
        rows = [row[:f] + i * n for i, (row, f) in enumerate(zip(order, counts, strict=True))]
        best = np.concatenate(rows)[: max(budget, 0)]
        best.sort()
    flat = tokens.ravel()
    if has_unused:
        best = best[flat[best] >= 0]
    best = best[(-chances.ravel()[best]).argsort(kind="stable")]
    return list(zip((best // n).tolist(), flat[best].tolist(), strict=True))


def _most_likely(scores: NDArray[np.floating], budget: int) -> NDArray[np.intp]:
    """Indices, rising, of the ``budget`` largest scores; of equal ones the first."""
    if budget <= 0:
        return np.empty(0, dtype=np.intp)
    if budget >= scores.size:
        return np.arange(scores.size)
    # A partition finds the cut in linear time but breaks ties arbitrarily.
    cut = np.partition(scores, -budget)[-budget]
    chosen = (scores >= cut).nonzero()[0]
    surplus = len(chosen) - budget
    if surplus:
        equal = (scores[chosen] == cut).nonzero()[0]
        chosen = np.delete(chosen, equal[-surplus:])
    return chosen


def _apportion(weights: Sequence[float], budget: int) -> list[int]:
    """Largest-remainder rounding of ``weights`` scaled to ``budget``; ties to the front."""
    scale = budget / sum(weights)
    exact = [w * scale for w in weights]
    counts = [int(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in order[: budget - sum(counts)]:
        counts[i] += 1
    return counts


def _check(budget: int, k: int) -> None:
    if k < 0:
        raise ConfigError("speculation.k", f"must be at least 0, got {k}")
    if budget < 0:
        raise ConfigError("speculation.fan_out", f"branches in all must be >= 0, got {budget}")
