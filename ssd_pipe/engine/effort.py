"""How much a round speculates, and what is known of each way to do it.

An *effort* is a chain length and a number of branches. Without branches the draft makes its chains
while the target waits (they take turns); without a chain the target decodes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ssd_pipe.config import Mode

KNOWN = 2.5  # rounds from which a record counts
DECAY = 0.97  # a round: some 30 rounds count
CLIP = 2.0  # a round longer than so many usual ones says more of the machine than of the effort
PRIOR_ROWS = 4.0
PRIOR_HITS = 0.7
TRUST = 100.0  # tokens that expectation counts for against what was emitted


class Effort(NamedTuple):
    """Draft tokens a chain, 0 = none; branches a row, 0 = chains are made just in time."""

    k: int
    branches: int

    @property
    def alone(self) -> bool:
        """Whether target and draft never compute at the same time."""
        return not self.branches


OFF = Effort(0, 0)


def ladder(k: int) -> list[int]:
    """Chain lengths worth telling apart, falling from ``k`` to 1."""
    lengths = [k]
    while lengths[-1] > 1:
        lengths.append(min(lengths[-1] - 1, math.ceil(lengths[-1] * 0.6)))
    return lengths


def budgets(k: int, k_max: int, budget: int) -> list[int]:
    """Branches a row worth trying with chains of ``k``, most first; ``budget`` is for ``k_max``."""
    full = max(1, round(budget * (k + 1) / (k_max + 1)))
    return sorted({full, max(1, full // 2)}, reverse=True)


def neighbours(
    mode: Mode, k_max: int, budget: int, in_turn: bool = True
) -> dict[Effort, tuple[Effort, ...]]:
    """Every effort of a mode, each with those to compare it with.

    One step in chain length or branches, plain decoding, and the other way to draft; from plain
    decoding, a few that differ much. ``in_turn`` False leaves out chains without branches in ssd.
    """
    lengths = ladder(k_max)
    parallel = mode == "ssd"
    turns = in_turn or not parallel

    def beside(k: int) -> list[int]:
        at = lengths.index(k)
        return lengths[max(0, at - 1) : at] + lengths[at + 1 : at + 2]

    def forked(k: int, level: int = 0) -> Effort:
        counts = budgets(k, k_max, budget) if parallel else [0]
        return Effort(k, counts[min(level, len(counts) - 1)])

    def kept(*efforts: Effort) -> tuple[Effort, ...]:
        usable = [e for e in efforts if e.branches or e == OFF or turns]
        return tuple(dict.fromkeys(usable))

    middle = lengths[min(1, len(lengths) - 1)]
    least, most = forked(1, 1), forked(k_max)
    found = {OFF: kept(Effort(1, 0), Effort(middle, 0), forked(1), least, most)}
    for k in lengths:
        if turns:
            aside = [Effort(other, 0) for other in beside(k)]
            forks = [forked(k), forked(k, 1)] if parallel else []
            found[Effort(k, 0)] = kept(OFF, *aside, *forks)
        for level in range(len(budgets(k, k_max, budget)) if parallel else 0):
            aside = [forked(other, level) for other in beside(k)]
            found[forked(k, level)] = kept(OFF, Effort(k, 0), *aside, forked(k, 1 - level))
    return {effort: tuple(e for e in others if e != effort) for effort, others in found.items()}


def batch_bucket(rows: int) -> int:
    """Batches that are treated alike: every size up to 8, then four to a doubling."""
    return rows if rows <= 8 else 8 + int(4 * math.log2(rows / 8))


def batch_rows(bucket: int) -> float:
    """The smallest batch of a bucket, as a number that need not be whole."""
    return bucket if bucket <= 8 else 8 * 2 ** ((bucket - 8) / 4)


class Record:
    """What rounds of one effort at about one batch size were like.

    Attributes:
        weight: rounds it rests on, older ones counting less.
        last: number of the latest round.
        rejected: it was so slow that fewer rounds are enough.
    """

    __slots__ = (
        "_actual",
        "_expected",
        "_offered",
        "_rows",
        "_seconds",
        "last",
        "rejected",
        "weight",
    )

    def __init__(self, effort: Effort) -> None:
        share = PRIOR_HITS if effort.branches else 1.0
        self.weight = 0.0
        self.last = 0
        self.rejected = False
        self._seconds = 0.0
        self._rows = PRIOR_ROWS
        self._offered = [PRIOR_ROWS * share] * effort.k
        self._actual = self._expected = TRUST

    def observe(
        self, number: int, seconds: float, lengths: Sequence[int], emitted: int, expected: float
    ) -> None:
        """A round: its wall time, how many rows had chains of 0..k tokens, and the tokens it
        emitted, beside those that chains of these lengths were expected to give."""
        if self.weight > 3:
            seconds = min(seconds, CLIP * self.seconds)
        self.last = number
        self._seconds = DECAY * self._seconds + seconds
        self.weight = DECAY * self.weight + 1
        reach = sum(lengths)
        self._rows = DECAY * self._rows + reach
        for j, ended in enumerate(lengths[:-1]):
            reach -= ended
            self._offered[j] = DECAY * self._offered[j] + reach
        self._actual = DECAY * self._actual + emitted + (1 - DECAY) * TRUST
        self._expected = DECAY * self._expected + expected + (1 - DECAY) * TRUST

    @property
    def known(self) -> bool:
        return self.weight >= (1.0 if self.rejected else KNOWN)

    @property
    def seconds(self) -> float:
        """Of a round."""
        return self._seconds / self.weight

    def tokens(self, acceptance: Sequence[float]) -> float:
        """A row emits a round, at the present acceptance by position."""
        expected, reach = 1.0, 1.0
        for offered, a in zip(self._offered, acceptance, strict=False):
            reach *= a
            expected += reach * offered / self._rows
        return expected * self._actual / self._expected

    def rate(self, acceptance: Sequence[float]) -> float:
        """Tokens a second and row."""
        return self.tokens(acceptance) / self.seconds
