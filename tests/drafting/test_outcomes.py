"""What the draft learns of its scores from outcomes."""

from __future__ import annotations

import numpy as np
import pytest

from ipc.messages.sampling import NoiseKey
from ssd_pipe.drafting.candidates import TEMPERATURES, ChainScores
from ssd_pipe.drafting.outcomes import GREEDY_TAU, SAMPLED_TAU, OutcomePredictor
from ssd_pipe.drafting.trunk import Trunk

GREEDY, SAMPLED = NoiseKey(), NoiseKey(1, 1.0)
ROUNDS = 400


def scores_of(chain: list[int], tests: np.ndarray | None = None) -> ChainScores:
    """Candidates 0, 1, 2 in this order after every prefix."""
    places = len(chain) + 1
    tokens = np.tile(np.arange(3), (places, 1))
    scores = np.tile([4.0, 2.0, 0.0], (places, 1))
    own = np.array([4.0 - 2 * token for token in chain])
    return ChainScores(tokens, scores, chain, own, tests)


def taught(key: NoiseKey, chain: list[int], outcome: list[int]) -> OutcomePredictor:
    predictor = OutcomePredictor()
    trunk = Trunk(0, 0, key, [9])
    for _ in range(ROUNDS):
        predictor.ask(0, scores_of(chain))
        predictor.note(trunk, outcome)
        predictor.study()
    return predictor


@pytest.mark.parametrize(("key", "other"), [(GREEDY, SAMPLED), (SAMPLED, GREEDY)])
def test_outcomes_that_scores_foretell_sharpen_them_and_others_flatten_them(
    key: NoiseKey, other: NoiseKey
) -> None:
    sure = taught(key, [0, 0], [0, 0, 0])
    assert sure.tau(key) == TEMPERATURES[0]
    assert taught(key, [0, 0], [2]).tau(key) == TEMPERATURES[-1]
    assert sure.tau(other) == {GREEDY: GREEDY_TAU, SAMPLED: SAMPLED_TAU}[other]


def test_nothing_is_learnt_before_there_is_time_or_of_a_sequence_that_is_gone() -> None:
    predictor = OutcomePredictor()
    trunk = Trunk(0, 0, GREEDY, [9])
    for _ in range(ROUNDS):
        predictor.ask(0, scores_of([0]))
        predictor.forget(0)
        predictor.note(trunk, [2])
        predictor.study()
    assert predictor.tau(GREEDY) == GREEDY_TAU
    for _ in range(ROUNDS):
        predictor.ask(0, scores_of([0]))
        predictor.note(trunk, [2])
    assert predictor.tau(GREEDY) == GREEDY_TAU
    predictor.study()
    assert predictor.tau(GREEDY) == TEMPERATURES[-1]


def test_tested_chains_teach_how_often_a_test_is_passed() -> None:
    predictor = OutcomePredictor()
    trunk = Trunk(0, 0, SAMPLED, [9])
    tests = np.array([0.25])
    before, _ = predictor.weights(SAMPLED, scores_of([0], tests))
    for _ in range(ROUNDS):
        predictor.ask(0, scores_of([0], tests))
        predictor.note(trunk, [1])  # refused
        predictor.study()
    after, weights = predictor.weights(SAMPLED, scores_of([0], tests))
    assert after[0] < 0.1 < before[0]
    assert weights[0, 0] == 0  # the chain's own token cannot be the recovery token
    assert weights[0].sum() == pytest.approx(1 - after[0])
