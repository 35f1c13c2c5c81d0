"""Plain-python sampling distributions and the chi-square test the sampling tests share."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from ipc.messages.sampling import NoiseKey

P_VALUE = 1e-4


def kept_tokens(logits: list[float], key: NoiseKey) -> list[int]:
    """Tokens that survive min-p, top-k and top-p, by the definitions, one token at a time."""
    tempered = [x / key.temperature for x in logits]
    peak = max(tempered)
    weight = [math.exp(x - peak) for x in tempered]
    order = sorted(range(len(logits)), key=lambda t: (-tempered[t], t))
    order = [t for t in order if weight[t] >= key.min_p]
    if key.top_k > 0:
        order = order[: key.top_k]
    if key.top_p >= 1:
        return sorted(order)
    total = math.fsum(weight[t] for t in order)
    kept, mass = [], 0.0
    for t in order:
        if kept and mass >= key.top_p * total:
            break
        kept.append(t)
        mass += weight[t]
    return sorted(kept)


def target_probs(logits: list[float], key: NoiseKey) -> np.ndarray:
    """The exact distribution of one token, float64 [V]."""
    probs = np.zeros(len(logits))
    peak = max(logits)
    for t in kept_tokens(logits, key):
        probs[t] = math.exp((logits[t] - peak) / key.temperature)
    return probs / probs.sum()


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value of counts under probs; small cells are pooled, impossible ones forbidden."""
    counts, probs = counts.ravel(), probs.ravel()
    assert counts[probs == 0].sum() == 0, "an impossible outcome occurred"
    expected = probs * counts.sum()
    small = expected < 5
    seen = np.append(counts[~small], counts[small].sum())
    want = np.append(expected[~small], expected[small].sum())
    if want[-1] < 5:  # too little to be a cell of its own
        seen = np.append(seen[:-2], seen[-2:].sum())
        want = np.append(want[:-2], want[-2:].sum())
    if len(want) == 1:
        return 1.0
    return float(stats.chisquare(seen, want * (seen.sum() / want.sum())).pvalue)
