from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ssd_pipe.engine.fanout import (
    geometric,
    outcome_probabilities,
    select_branches,
    uniform,
)
from ssd_pipe.errors import ConfigError

budgets = st.integers(0, 256)
lengths = st.integers(0, 32)


@given(budgets, lengths)
def test_uniform_sums_and_is_even(budget: int, k: int) -> None:
    counts = uniform(budget, k)
    assert len(counts) == k + 1
    assert sum(counts) == budget
    assert max(counts) - min(counts) <= 1


@given(budgets, lengths, st.floats(0, 1), st.floats(0.05, 5))
def test_geometric_sums_and_falls(budget: int, k: int, a: float, r: float) -> None:
    counts = geometric(budget, k, a, r)
    assert len(counts) == k + 1
    assert sum(counts) == budget
    assert min(counts) >= 0
    assert counts[:k] == sorted(counts[:k], reverse=True)


@given(st.integers(1, 8), st.floats(0.05, 0.95), st.floats(0.1, 3), st.integers(1, 200))
def test_geometric_is_theorem_12_within_rounding(k: int, a: float, r: float, budget: int) -> None:
    shape = [a ** (i / (1 + r)) for i in range(k)]
    shape.append(a ** (k / (1 + r)) * (1 - a) ** (-1 / (1 + r)))
    for count, share in zip(geometric(budget, k, a, r), shape, strict=True):
        assert abs(count - budget * share / sum(shape)) < 1 + 1e-9


@given(st.integers(1, 8), st.floats(0.1, 3), st.integers(0, 100))
def test_geometric_at_the_ends_of_acceptance(k: int, r: float, budget: int) -> None:
    assert geometric(budget, k, 0.0, r) == [budget] + [0] * k
    assert geometric(10, k, 1.0, r)[k] >= max(geometric(10, k, 0.7, r)[k], 1)


def test_geometric_known_split() -> None:
    # r = 1: square roots. a = 1/4, k = 2: weights 1, 1/2, 1/4 / sqrt(3/4).
    total = 1 + 0.5 + 0.25 / math.sqrt(0.75)
    assert [round(1000 * w / total) for w in (1, 0.5)] == geometric(1000, 2, 0.25, 1.0)[:2]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((-1, 5, 0.5, 1.0), "fan_out"),
        ((10, -1, 0.5, 1.0), r"speculation\.k"),
        ((10, 5, 1.5, 1.0), "acceptance"),
        ((10, 5, math.nan, 1.0), "acceptance"),
        ((10, 5, 0.5, 0.0), "exponent"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[int, int, float, float], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        geometric(*arguments)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Candidates (some places unused), weights from few values so that ties are common, a_j."""
    k, n = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(n + 5)[:n] for _ in range(k + 1)])
    tokens[rng.random(tokens.shape) < draw(st.sampled_from([0, 0.3]))] = -1
    ties = draw(st.booleans())
    weights = rng.integers(0, 4, tokens.shape) / 4 if ties else rng.random(tokens.shape)
    accept = draw(hnp.arrays(np.float64, k, elements=st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])))
    return tokens, weights, accept


def brute_force(tokens: np.ndarray, scores: np.ndarray) -> list[tuple[float, int, int, int]]:
    """All outcomes, most likely first; ties by k, then place."""
    return sorted(
        (-scores[k, i], k, i, int(tokens[k, i]))
        for k in range(tokens.shape[0])
        for i in range(tokens.shape[1])
        if tokens[k, i] >= 0
    )


@given(rounds(), st.integers(0, 60))
def test_confidence_selection_is_optimal(
    round_: tuple[np.ndarray, np.ndarray, np.ndarray], budget: int
) -> None:
    tokens, weights, accept = round_
    scores = np.array(
        [[math.prod(accept[:k].tolist()) * w for w in row] for k, row in enumerate(weights)]
    )
    np.testing.assert_allclose(outcome_probabilities(weights, accept), scores, rtol=1e-12)
    chosen = select_branches(tokens, weights, accept, None, budget)
    best = brute_force(tokens, outcome_probabilities(weights, accept))[:budget]
    assert chosen == [(k, t) for _, k, _, t in best]
    assert len(set(chosen)) == len(chosen) == min(budget, int((tokens >= 0).sum()))


@given(rounds(), st.data())
def test_counts_take_the_heaviest_of_each_length(
    round_: tuple[np.ndarray, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    tokens, weights, accept = round_
    k, n = len(accept), tokens.shape[1]
    counts = data.draw(st.lists(st.integers(0, n + 2), min_size=k + 1, max_size=k + 1))
    chosen = select_branches(tokens, weights, accept, counts, sum(counts))
    expected = []
    for i in range(k + 1):
        row = brute_force(tokens[i : i + 1], weights[i : i + 1])[: counts[i]]
        expected += [(i, t) for _, _, _, t in row]
    assert sorted(chosen) == sorted(expected)
    chances = outcome_probabilities(weights, accept)
    place = {(i, int(t)): chances[i, j] for i in range(k + 1) for j, t in enumerate(tokens[i])}
    ranked = [place[outcome] for outcome in chosen]
    assert ranked == sorted(ranked, reverse=True)


def test_budget_bounds_counts_too() -> None:
    tokens = np.arange(8).reshape(2, 4)
    weights = np.full((2, 4), 0.5)
    assert select_branches(tokens, weights, [0.5], [2, 2], 3) == [(0, 0), (0, 1), (1, 4)]
    assert select_branches(tokens, weights, [0.5], [2, 2], 0) == []
    with pytest.raises(ConfigError, match="counts"):
        select_branches(tokens, weights, [0.5], [2, 2, 2], 6)
