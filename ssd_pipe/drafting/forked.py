"""A tree whose branches the GPU chose, and what it chose them from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.cuda.candidate_box import SIDES, CandidateBox, Shown
from models.cuda.tree import TreeGraph
from ssd_pipe.drafting.candidates import ChainScores
from ssd_pipe.drafting.gpu_waits import wait_until


@dataclass(slots=True)
class Forked:
    """A tree under way whose branches the GPU chose, and what it chose from.

    Attributes:
        tree: its graph.
        shown: candidates and branches, on their way to the host.
        box, number: tell when they are there, and the tree may begin.
        launched: parts of the tree that are.
    """

    tree: TreeGraph
    shown: Shown
    box: CandidateBox
    number: int
    launched: int = 0

    def arrived(self) -> bool:
        """Whether the glue pass has ended."""
        return self.box.arrived(self.number)

    def outcomes(self, row: int) -> list[tuple[int, int]]:
        """(k, t*) of row ``row``'s branches, likeliest first, of a glue pass that has ended."""
        words = self.shown.outcomes[row]
        chosen = words[words >= 0]
        return list(zip((chosen >> 32).tolist(), (chosen & 0xFFFFFFFF).tolist(), strict=True))

    def pending(self, row: int, first: int, chain: list[int]) -> PendingScores:
        """``candidates``, once they are asked for."""
        return PendingScores(self, row, first, chain)

    def candidates(self, row: int, first: int, chain: list[int]) -> ChainScores:
        """What row ``row``'s branches were chosen from; ``first`` as in ``ForkRow``."""
        wait_until(self.arrived)
        span = slice(first, first + len(chain) + 1)
        return ChainScores(
            self.shown.tokens[row, span].copy(),
            self.shown.scores[row, span].astype(np.float64),
            chain,
            self.shown.own[row, span].astype(np.float64)[: len(chain)],
        )


@dataclass(slots=True)
class PendingScores:
    """``ChainScores`` of one row of a Forked, read when they are asked for."""

    forked: Forked
    row: int
    first: int
    chain: list[int]
    tests: None = None

    @property
    def gone(self) -> bool:
        """Whether a later pass may have been shown in their place."""
        forked = self.forked
        return forked.box.arrived(forked.number + SIDES)

    def likelihoods(self, accepted: int, token: int) -> np.ndarray:
        """See ``ChainScores.likelihoods``."""
        found = self.forked.candidates(self.row, self.first, self.chain)
        return found.likelihoods(accepted, token)
