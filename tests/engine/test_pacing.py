from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_pipe.engine.pacing import (
    KEEP,
    PRIOR,
    STRENGTH,
    AcceptanceEstimator,
    Ema,
    StageTimes,
    best_chain_length,
    expected_tokens,
    worth_waiting,
)
from ssd_pipe.errors import ConfigError

probability = st.floats(0, 1)
seconds = st.floats(1e-4, 10)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.floats(0, 0.99))
def test_ema_is_a_weighted_mean_with_newer_values_heavier(xs: list[float], decay: float) -> None:
    ema = Ema(decay)
    assert ema.value(3.5) == 3.5
    for x in xs:
        ema.observe(x)
    weights = [decay**i for i in range(len(xs))][::-1]
    expected = sum(w * x for w, x in zip(weights, xs, strict=True)) / sum(weights)
    assert ema.value(0) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.integers(0, 3).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))))
def test_acceptance_is_a_weighted_mean_of_what_was_judged(rounds: list[tuple[int, int]]) -> None:
    estimator = AcceptanceEstimator(3)
    for accepted, chain in rounds:
        estimator.observe(accepted, chain)
    weights = [KEEP**i for i in range(len(rounds))][::-1]
    taken, judged = [
        [sum(w * counts(j, *r) for w, r in zip(weights, rounds, strict=True)) for j in range(3)]
        for counts in (lambda j, n, chain: j < n, lambda j, n, chain: j <= n and j < chain)
    ]
    overall = (sum(taken) + PRIOR * STRENGTH) / (sum(judged) + STRENGTH)
    assert estimator.overall == pytest.approx(overall)
    assert estimator.per_position() == pytest.approx(
        [(t + overall * STRENGTH) / (n + STRENGTH) for t, n in zip(taken, judged, strict=True)]
    )


def test_acceptance_comes_near_the_truth() -> None:
    rng = np.random.default_rng(1)
    truth = [0.9, 0.6, 0.3]
    estimator = AcceptanceEstimator(3)
    seen = []
    for _ in range(4000):
        run = 0
        while run < 3 and rng.random() < truth[run]:
            run += 1
        estimator.observe(run, 3)
        seen.append(estimator.per_position())
    assert np.mean(seen[500:], axis=0) == pytest.approx(truth, abs=0.06)  # the prior pulls


def test_acceptance_follows_a_change_and_starts_from_the_prior() -> None:
    estimator = AcceptanceEstimator(2)
    assert estimator.overall == PRIOR
    assert estimator.per_position() == [PRIOR, PRIOR]
    for _ in range(100):
        estimator.observe(2, 2)
    high = estimator.overall
    for _ in range(100):
        estimator.observe(0, 1)
    assert high > 0.8
    assert estimator.per_position()[0] < 0.2
    estimator.observe(0, 0)  # a round without a chain judges nothing
    assert 0 <= estimator.overall <= 1


def test_stage_times_interpolate_between_token_counts() -> None:
    times = StageTimes()
    assert times.verify(6) == 0
    times.observe_verify(6, 0.050)
    assert times.verify(1) == times.verify(9) == pytest.approx(0.050)
    times.observe_verify(1, 0.030)
    assert times.verify(1) == pytest.approx(0.030)
    assert times.verify(3) == pytest.approx(0.038)
    assert times.time("glue") == 0
    times.observe("glue", 0.001)
    times.observe("glue", 0.004)
    assert times.time("glue") == pytest.approx((0.9 * 0.001 + 0.004) / 1.9)


@given(st.floats(0, 0.999), st.integers(0, 12))
def test_expected_tokens_is_the_geometric_sum(a: float, depth: int) -> None:
    closed = (1 - a ** (depth + 1)) / (1 - a)
    assert expected_tokens(a, depth) == pytest.approx(closed, rel=1e-6)
    assert expected_tokens([a] * 12, depth) == pytest.approx(closed, rel=1e-6)


@given(st.lists(probability, min_size=1, max_size=5))
def test_expected_tokens_counts_every_outcome(a: list[float]) -> None:
    by_outcome = sum(
        (i + 1) * math.prod(a[:i]) * ((1 - a[i]) if i < len(a) else 1) for i in range(len(a) + 1)
    )
    assert expected_tokens(a, len(a)) == pytest.approx(by_outcome, abs=1e-9)


@given(probability, st.integers(0, 8), seconds, seconds)
def test_waiting_pays_exactly_when_the_rate_rises(
    a: float, depth: int, verify: float, step: float
) -> None:
    rate_now = expected_tokens(a, depth) / verify
    rate_later = expected_tokens(a, depth + 1) / (verify + step)
    if not math.isclose(rate_now, rate_later, rel_tol=1e-9):
        assert worth_waiting(a, depth, verify, step) == (rate_later > rate_now)
        assert worth_waiting(a, depth, lambda _: verify, step) == (rate_later > rate_now)


def test_waiting_knows_its_limits() -> None:
    assert worth_waiting([0.9, 0.9], 1, 1.0, 0.01)
    assert not worth_waiting([0.9, 0.9], 2, 1.0, 0.01)
    assert not worth_waiting([0.9, 0.0], 1, 1.0, 0.01)
    # A verification that gets dearer by the token can make a cheap step not worth it.
    assert not worth_waiting(0.5, 1, float, 0.001)


@given(probability, seconds, seconds, seconds, st.integers(0, 8))
def test_best_chain_is_the_best_of_all_lengths(
    a: float, verify: float, glue: float, step: float, k_max: int
) -> None:
    def rate(k: int) -> float:
        cost = verify * (1 + 0.1 * k) + (glue + (k - 1) * step if k else 0)
        return expected_tokens(a, k) / cost

    best = best_chain_length(a, lambda tokens: verify * (1 + 0.1 * (tokens - 1)), glue, step, k_max)
    assert 0 <= best <= k_max
    assert rate(best) >= max(rate(k) for k in range(k_max + 1)) * (1 - 1e-12)


def test_best_chain_examples() -> None:
    assert best_chain_length(0.0, 1.0, 0.1, 0.1, 8) == 0
    assert best_chain_length(0.9, 1.0, 5.0, 5.0, 8) == 0
    assert best_chain_length(0.9, 1.0, 0.001, 0.001, 8) == 8
    assert best_chain_length([0.9] * 3, 1.0, 0.001, 0.001, 8) == 3
    # The brief's CPU numbers: a short chain beats none and beats the longest.
    assert 1 <= best_chain_length(0.7, lambda n: 0.026 + 0.0035 * n, 0.004, 0.003, 32) < 10


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match="decay"):
        Ema(1.0)
    with pytest.raises(ConfigError, match=r"speculation\.k"):
        AcceptanceEstimator(0)
