"""Totals of all rounds since start."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ssd_pipe.engine.effort import OFF, Effort


class Counters(msgspec.Struct):
    """Totals since start, under the names that they have in statistics.

    ``steps_*``: target steps by how they speculated. ``*_at``: by accepted length, 0 .. k.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    backup_jit: int = 0
    backup_ngram: int = 0
    backup_none: int = 0
    steps_plain: int = 0
    steps_in_turn: int = 0
    steps_parallel: int = 0
    accepted_at: list[int] = []
    judged_at: list[int] = []
    hits_at: list[int] = []
    misses_at: list[int] = []

    @classmethod
    def of(cls, k: int) -> Counters:
        """Zeros, for chains of up to ``k`` tokens."""
        width = k + 1
        return cls(
            accepted_at=[0] * width,
            judged_at=[0] * width,
            hits_at=[0] * width,
            misses_at=[0] * width,
        )

    def step(self, effort: Effort) -> None:
        """A target step begins."""
        if effort == OFF:
            self.steps_plain += 1
        elif effort.alone:
            self.steps_in_turn += 1
        else:
            self.steps_parallel += 1

    def verified(self, accepted: int, chain: int) -> None:
        """A chain of so many tokens (at least 1) was judged."""
        self.rounds += 1
        self.drafted += chain
        self.accepted += accepted
        self.accepted_at[accepted] += 1
        for j in range(min(accepted + 1, chain)):
            self.judged_at[j] += 1

    def looked_up(self, accepted: int, hit: bool) -> None:
        """An outcome was looked up in the speculation cache."""
        if hit:
            self.hits += 1
            self.hits_at[accepted] += 1
        else:
            self.misses += 1
            self.misses_at[accepted] += 1

    def backed_up(self, jit: bool, chain: Sequence[int]) -> None:
        """A row without a chain has one drafted just in time, or else it took ``chain``."""
        if jit:
            self.backup_jit += 1
        elif chain:
            self.backup_ngram += 1
        else:
            self.backup_none += 1
