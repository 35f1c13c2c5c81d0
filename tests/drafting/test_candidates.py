"""Weights of candidates and the calibration temperature."""

from __future__ import annotations

import numpy as np
import pytest

from ssd_pipe.drafting.candidates import AcceptanceCurve, Calibration, ChainScores


def scores_of(logits: np.ndarray, chain: list[int], n: int) -> ChainScores:
    order = (-logits).argsort(axis=1)[:, :n]
    own = np.array([logits[i, token] for i, token in enumerate(chain)])
    return ChainScores(order, np.take_along_axis(logits, order, 1), chain, own)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_weights_are_one_softmax_over_the_candidates(tau: float) -> None:
    logits = np.random.default_rng(0).normal(0, 2, (3, 20))
    accept, weights = scores_of(logits, [4, 7], 20).weights(tau, AcceptanceCurve())
    whole = softmax(logits / tau)
    order = (-logits).argsort(axis=1)
    assert weights == pytest.approx(np.take_along_axis(whole, order, 1))
    assert accept == pytest.approx([whole[0, 4], whole[1, 7]])


def test_a_chain_token_outside_the_candidates_still_counts() -> None:
    logits = np.array([[5.0, 4.0, 1.0], [0.0, 1.0, 2.0]])
    accept, weights = scores_of(logits, [2], 2).weights(1.0, AcceptanceCurve())
    whole = softmax(logits)
    assert accept == pytest.approx([whole[0, 2]])
    assert weights[0] == pytest.approx(whole[0, :2])


def test_calibration_finds_the_temperature_of_the_outcomes() -> None:
    rng = np.random.default_rng(5)
    for true in (0.5, 1.5):
        calibration = Calibration(0.85)
        for _ in range(400):
            logits = rng.normal(0, 2, (3, 30))
            whole = softmax(logits / true)
            chain = [int(rng.choice(30, p=row)) for row in softmax(logits[:2])]
            k = 0
            while True:
                token = int(rng.choice(30, p=whole[k]))
                if k == 2 or token != chain[k]:
                    break
                k += 1
            calibration.observe(scores_of(logits, chain, 30).likelihoods(k, token))
        assert calibration.tau == pytest.approx(true, abs=0.31)


def test_calibration_starts_at_its_prior() -> None:
    assert Calibration(0.7).tau == 0.7
    assert Calibration(0.85).tau == 0.85


def test_the_curve_learns_how_often_a_ratio_reaches_a_uniform() -> None:
    rng = np.random.default_rng(2)
    curve = AcceptanceCurve()
    for _ in range(3000):
        tests = rng.random(4)
        passed = tests**2 <= rng.random(4)  # chance 1 - u^2
        curve.observe(tests, int(np.append(~passed, True).argmax()))
    at = np.array([0.05, 0.55, 0.95])
    assert curve.chances(at) == pytest.approx(1 - at**2, abs=0.06)


def test_where_tokens_are_tested_the_rest_is_shared_out_among_the_others() -> None:
    logits = np.random.default_rng(3).normal(0, 2, (3, 20))
    scores = scores_of(logits, [4, 7], 20)
    scores.tests = np.array([0.1, 0.9])
    curve = AcceptanceCurve()
    accept, weights = scores.weights(0.7, curve)
    assert accept == pytest.approx(curve.chances(scores.tests))
    assert weights.sum(axis=1) == pytest.approx([1 - accept[0], 1 - accept[1], 1.0])
    for j, token in enumerate(scores.chain):
        assert weights[j][scores.tokens[j] == token] == 0
    others = softmax(np.delete(logits[:1], 4, axis=1) / 0.7)
    assert np.sort(weights[0])[1:] == pytest.approx(np.sort(others[0]) * (1 - accept[0]))


def test_calibration_of_tested_chains_goes_by_the_recovery_token() -> None:
    rng = np.random.default_rng(6)
    for true in (0.5, 1.5):
        calibration = Calibration(0.85)
        for _ in range(400):
            logits = rng.normal(0, 2, (1, 30))
            chain = [int(rng.integers(30))]
            scores = scores_of(np.vstack([logits, logits]), chain, 30)
            scores.tests = np.array([1.0])
            others = softmax(logits / true)[0]
            others[chain[0]] = 0
            token = int(rng.choice(30, p=others / others.sum()))
            calibration.observe(scores.likelihoods(0, token))
        assert calibration.tau == pytest.approx(true, abs=0.31)
