"""From the draft's scores over a chain to the branches worth speculating on.

Works on the top candidates of each position only: with a temperature below one the rest of the
vocabulary weighs next to nothing, and a few rows of 64 numbers cost microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

TEMPERATURES = np.array([0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.5])
"""Grid of calibration temperatures."""
TOP_CANDIDATES = 64
"""Candidates looked at after each prefix of a chain."""
_DECAY = 0.98
_FLOOR = 1e-6
_CURVE_BINS = 10
_CURVE_PRIOR = 8.0  # tests a bin that the prior counts as


@dataclass(slots=True)
class ChainScores:
    """Top candidates after each prefix of one chain.

    Attributes:
        tokens: int64 [K + 1, n], best first.
        scores: float64 [K + 1, n], the draft's (noised) scores of them.
        chain: the chain, length K.
        chain_scores: float64 [K], score of each chain token at its position.
        tests: float64 [K], the uniforms that the chain's tokens are tested with where each was
            drawn from the draft's distribution (rejection rule); None where the target's own
            choice decides.
    """

    tokens: np.ndarray
    scores: np.ndarray
    chain: list[int]
    chain_scores: np.ndarray
    tests: np.ndarray | None = None

    @property
    def gone(self) -> bool:
        """Whether they can no longer be read; see ``forked.PendingScores``."""
        return False

    def weights(self, tau: float, curve: AcceptanceCurve) -> tuple[np.ndarray, np.ndarray]:
        """(a, w): chance that the target accepts chain token j given it got there [K], and that
        it chooses each candidate [K + 1, n].

        By a softmax of scores / tau. Where tokens are tested, a is what ``curve`` says of their
        uniforms, and the softmax shares out the rest among the others.
        """
        if self.tests is not None:
            accept = curve.chances(self.tests)
            weights = self._residual(np.array([tau]))[0]
            weights[: len(self.chain)] *= 1 - accept[:, None]
            return accept, weights
        top = self.scores[:, :1]
        exp = np.exp((self.scores - top) / tau)
        total = exp.sum(axis=1, keepdims=True)
        length = len(self.chain)
        chain_exp = np.exp((self.chain_scores - top[:length, 0]) / tau)
        known = (self.tokens[:length] == np.array(self.chain, np.int64)[:, None]).any(axis=1)
        total[:length, 0] += np.where(known, 0.0, chain_exp)
        return chain_exp / total[:length, 0], exp / total

    def _residual(self, taus: np.ndarray) -> np.ndarray:
        """float64 [T, K + 1, n]: softmax over the candidates that are not the chain's own token."""
        scores = self.scores.copy()
        length = len(self.chain)
        scores[:length][self.tokens[:length] == np.array(self.chain, np.int64)[:, None]] = -np.inf
        top = np.maximum(scores.max(axis=1, keepdims=True), np.finfo(np.float64).min)
        exp = np.exp((scores - top) / taus[:, None, None])
        result: np.ndarray = exp / np.maximum(exp.sum(axis=2, keepdims=True), _FLOOR)
        return result

    def likelihoods(self, accepted: int, token: int) -> np.ndarray:
        """Log likelihood of outcome (accepted, token) under each of TEMPERATURES; where tokens are
        tested, that of the token alone."""
        if self.tests is not None:
            chances = self._residual(TEMPERATURES)[:, accepted]
            known = self.tokens[accepted] == token
            chance = np.maximum(chances[:, known].sum(axis=1), _FLOOR)
            tested: np.ndarray = np.log(chance)
            return tested
        rows = slice(0, accepted + 1)
        top = self.scores[rows, :1]
        taus = TEMPERATURES[:, None]
        exp = np.exp((self.scores[rows] - top) / taus[..., None])
        total = exp.sum(axis=2)
        chance = np.full(len(TEMPERATURES), _FLOOR)
        at = np.flatnonzero(self.tokens[accepted] == token)
        if accepted < len(self.chain) and not (self.tokens[accepted] == self.chain[accepted]).any():
            own = (self.chain_scores[accepted] - top[accepted, 0]) / TEMPERATURES
            total[:, accepted] += np.exp(own)
        if accepted:
            chain = np.array(self.chain[:accepted], np.int64)[:, None]
            own = np.exp((self.chain_scores[:accepted] - top[:accepted, 0]) / taus)
            known = (self.tokens[:accepted] == chain).any(axis=1)
            total[:, :accepted] += np.where(known, 0.0, own)
            a = np.maximum(own / total[:, :accepted], _FLOOR)
        if len(at):
            chance = np.maximum(exp[:, accepted, at[0]] / total[:, accepted], _FLOOR)
        result: np.ndarray = np.log(chance)
        return result + np.log(a).sum(axis=1) if accepted else result


@dataclass(slots=True)
class Calibration:
    """Picks the temperature under which the draft's scores predict outcomes best.

    Starts from ``prior`` and follows a decaying sum of log likelihoods over the grid.
    """

    prior: float
    _sums: np.ndarray = field(default_factory=lambda: np.zeros(len(TEMPERATURES)))

    def __post_init__(self) -> None:
        # Worth a handful of outcomes: enough to start well, little enough to be overruled.
        self._sums -= 4.0 * np.abs(np.log(TEMPERATURES / self.prior))

    def observe(self, likelihoods: np.ndarray) -> None:
        """Add one outcome's log likelihoods (``ChainScores.likelihoods``)."""
        self._sums = self._sums * _DECAY + likelihoods

    @property
    def tau(self) -> float:
        return float(TEMPERATURES[int(self._sums.argmax())])


class AcceptanceCurve:
    """Chance that a proposal passes its test, by the uniform u it is tested with.

    A proposal x drawn from q passes when u <= p(x) / q(x). The draft knows u and has only an idea
    of p / q, but how often that ratio reaches u can be counted: the chance falls with u.
    """

    def __init__(self) -> None:
        middle = (np.arange(_CURVE_BINS) + 0.5) / _CURVE_BINS
        self._tested = np.full(_CURVE_BINS, _CURVE_PRIOR)
        self._passed = _CURVE_PRIOR * (1 - 0.7 * middle)

    def observe(self, tests: np.ndarray, accepted: int) -> None:
        """A chain tested with uniforms ``tests`` [K] was accepted up to ``accepted``."""
        tested = self._bins(tests[: accepted + 1])
        np.add.at(self._tested, tested, 1.0)
        np.add.at(self._passed, tested[:accepted], 1.0)
        if self._tested.sum() > _CURVE_BINS * 50 * _CURVE_PRIOR:  # follow the text
            self._tested *= 0.5
            self._passed *= 0.5

    def chances(self, tests: np.ndarray) -> np.ndarray:
        """float64 [K] for uniforms [K]."""
        result: np.ndarray = (self._passed / self._tested)[self._bins(tests)]
        return result

    @staticmethod
    def _bins(tests: np.ndarray) -> np.ndarray:
        result: np.ndarray = np.minimum((tests * _CURVE_BINS).astype(np.int64), _CURVE_BINS - 1)
        return result
