"""How likely the outcomes of a verification are, learnt from those that came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ipc.messages.sampling import NoiseKey
from ssd_pipe.drafting.candidates import AcceptanceCurve, Calibration, ChainScores
from ssd_pipe.drafting.trunk import Trunk

if TYPE_CHECKING:
    from ssd_pipe.drafting.forked import PendingScores

GREEDY_TAU, SAMPLED_TAU = 0.7, 0.85


class OutcomePredictor:
    """Calibrates the draft's scores: greedy and sampled rows apart, tested proposals by their
    uniforms.

    An outcome is noted when it is told and learnt from later, when there is time.
    """

    def __init__(self) -> None:
        self._calibration = {True: Calibration(GREEDY_TAU), False: Calibration(SAMPLED_TAU)}
        self._curve = AcceptanceCurve()
        self._asked: dict[int, ChainScores | PendingScores] = {}
        self._lessons: list[tuple[bool, ChainScores | PendingScores, int, int]] = []

    def tau(self, key: NoiseKey) -> float:
        """Temperature under which the softmax of scores predicts a row's outcomes best."""
        return self._calibration[key.temperature == 0].tau

    def weights(self, key: NoiseKey, scores: ChainScores) -> tuple[np.ndarray, np.ndarray]:
        """Chances float64 [K] that the target accepts each chain token given it got there, and
        [K + 1, n] that it chooses each candidate."""
        return scores.weights(self.tau(key), self._curve)

    def ask(self, slot: int, scores: ChainScores | PendingScores) -> None:
        """The slot's next outcome is to be predicted from these."""
        self._asked[slot] = scores

    def forget(self, slot: int) -> None:
        """No outcome of this slot will come."""
        self._asked.pop(slot, None)

    def note(self, trunk: Trunk, tokens: Sequence[int]) -> None:
        """The outcome that newly committed ``tokens`` tell of has come."""
        scores = self._asked.pop(trunk.slot, None)
        if scores is None or not tokens:
            return
        k = 0
        while k < len(tokens) - 1 and k < len(scores.chain) and tokens[k] == scores.chain[k]:
            k += 1
        self._lessons.append((trunk.key.temperature == 0, scores, k, tokens[k]))

    def study(self) -> None:
        """Learn from the outcomes noted since the last time, if what they were predicted from is
        still there."""
        for greedy, scores, k, token in self._lessons:
            likelihoods = scores.likelihoods(k, token)
            if scores.gone:  # also if they went while they were read
                continue
            self._calibration[greedy].observe(likelihoods)
            if scores.tests is not None:
                self._curve.observe(scores.tests, k)
        self._lessons.clear()
