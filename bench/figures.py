"""Numbers out of samples: rates, percentiles, shares, ratios of runs made side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bench.engines import Answer


def median(values: Sequence[float]) -> float | None:
    """None without values."""
    return float(np.median(values)) if values else None


def percentile(values: Sequence[float], q: float) -> float | None:
    """``q`` in 0..100, linear between neighbours; None without values."""
    return float(np.percentile(values, q)) if values else None


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``; None if there is nothing to divide by."""
    return part / whole if whole else None


def decode_seconds(answer: Answer) -> float:
    """From the first piece's arrival to the last one's."""
    return answer.arrivals[-1][0] - answer.arrivals[0][0] if answer.arrivals else 0.0


def decode_tokens(answer: Answer) -> int:
    """Tokens that came after the first piece."""
    return sum(n for _, n in answer.arrivals[1:])


def decode_rounds(answer: Answer) -> int:
    """Pieces after the first: each is the outcome of one target step."""
    return max(0, len(answer.arrivals) - 1)


def decode_rate(answers: Sequence[Answer]) -> float | None:
    """Tokens a second over all ``answers``, their first pieces and the time before left out."""
    return ratio(sum(map(decode_tokens, answers)), sum(map(decode_seconds, answers)))


def throughput(answers: Sequence[Answer], batch: int) -> float | None:
    """Output tokens a second of one pass, requests whole; those of a batch ran together."""
    whole = [a for a in answers if a.arrivals]
    if not whole:
        return None
    ends = [a.arrivals[-1][0] for a in whole]
    if batch == 1:
        seconds = sum(end - a.started for a, end in zip(whole, ends, strict=True))
    else:
        seconds = max(ends) - min(a.started for a in whole)
    return ratio(sum(len(a.tokens) for a in whole), seconds)


def token_gaps(answer: Answer) -> list[float]:
    """Seconds per token, one value a token: a piece's gap is shared out among its tokens."""
    gaps: list[float] = []
    for (before, _), (now, count) in zip(answer.arrivals, answer.arrivals[1:], strict=False):
        gaps += [(now - before) / count] * count
    return gaps


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """How far each counter went; a name that was not there before counts from 0."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def total(counters: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum by name."""
    summed: dict[str, float] = {}
    for values in counters:
        for name, value in values.items():
            summed[name] = summed.get(name, 0.0) + value
    return summed


def indexed(counters: Mapping[str, float], name: str) -> list[float]:
    """``name_0``, ``name_1``, ... as a list."""
    values: list[float] = []
    while f"{name}_{len(values)}" in counters:
        values.append(counters[f"{name}_{len(values)}"])
    return values


def histogram_median(counts: Sequence[float], width: float) -> float | None:
    """Median of values counted in bins of ``width`` from 0 on, linear within its bin."""
    half = sum(counts) / 2
    below = 0.0
    for i, count in enumerate(counts):
        if count and below + count >= half:
            return (i + (half - below) / count) * width
        below += count
    return None


def acceptance_by_position(
    accepted_at: Sequence[float], judged_at: Sequence[float]
) -> list[float | None]:
    """Chance of each draft token given that all before it were accepted.

    ``accepted_at[k]`` counts rounds that accepted exactly k tokens, ``judged_at[j]`` those whose
    chain had a token j that was judged.
    """
    reached = np.cumsum(np.asarray(accepted_at, float)[::-1])[::-1]
    return [ratio(float(reached[j + 1]), float(judged_at[j])) for j in range(len(reached) - 1)]


def shares(hits: Sequence[float], misses: Sequence[float]) -> list[float | None]:
    """Hits of each pair's sum; None where there was neither."""
    return [ratio(h, h + m) for h, m in zip(hits, misses, strict=True)]


def paired_ratios(
    ours: Mapping[tuple[str, int], float], theirs: Mapping[tuple[str, int], float]
) -> list[float]:
    """Ours over theirs for every (prompt, repeat) that both have."""
    return [ours[key] / theirs[key] for key in ours if theirs.get(key)]
