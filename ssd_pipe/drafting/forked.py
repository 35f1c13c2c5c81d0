"""A tree whose branches the GPU chose, and the scores it chose them from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.cuda.staging import Mark
from models.cuda.tree import TreeGraph
from ssd_pipe.drafting.candidates import ChainScores


@dataclass(slots=True)
class Forked:
    """A tree under way whose branches the GPU chose, and what it chose from.

    Attributes:
        tree: its graph.
        tokens, scores, own: int64 and float32 [rows, K + 1, n], float32 [rows, K + 1], on their
            way to the host; see ``StepOutput``.
        arrived: when they are there, and the tree may begin.
        launched: parts of the tree that are.
    """

    tree: TreeGraph
    tokens: np.ndarray
    scores: np.ndarray
    own: np.ndarray
    arrived: Mark
    launched: int = 0

    def pending(self, row: int, first: int, chain: list[int]) -> PendingScores:
        """``candidates``, once they are asked for."""
        return PendingScores(self, row, first, chain)

    def candidates(self, row: int, first: int, chain: list[int]) -> ChainScores:
        """What row ``row``'s branches were chosen from; ``first`` as in ``ForkRow``."""
        self.arrived.wait()
        span = slice(first, first + len(chain) + 1)
        return ChainScores(
            self.tokens[row, span].copy(),
            self.scores[row, span].astype(np.float64),
            chain,
            self.own[row, span].astype(np.float64)[: len(chain)],
        )


@dataclass(slots=True)
class PendingScores:
    """``ChainScores`` of one row of a Forked, read when they are asked for."""

    forked: Forked
    row: int
    first: int
    chain: list[int]
    tests: None = None

    def likelihoods(self, accepted: int, token: int) -> np.ndarray:
        """See ``ChainScores.likelihoods``."""
        found = self.forked.candidates(self.row, self.first, self.chain)
        return found.likelihoods(accepted, token)
