"""The branches of a round and the batches that extend them.

A branch (k, t*) sees the trunk up to the k-th chain token and its own tokens, which live in scratch
slots beside the trunk's blocks. Branches of a row are ordered by likelihood; from one depth to the
next only the leading share goes on (``taper``), because the last places are seldom asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ipc.messages.draft import DraftRow
from models.batch import ForwardBatch
from ssd_pipe.drafting.trunk import Trunk
from ssd_pipe.engine.partition import Share
from ssd_pipe.sampling.filters import RowSampling
from ssd_pipe.sampling.processors import Place, SequenceRules


@dataclass(slots=True)
class Branches:
    """The branches of one row that this worker extends.

    Attributes:
        chain: the tokens under verification.
        outcomes: (k, t*) of each, likeliest first; place i in this worker's part of the cache.
        total: branches of the row, all workers together.
        share: which of them are this worker's.
    """

    row: DraftRow
    trunk: Trunk
    chain: list[int]
    outcomes: Sequence[tuple[int, int]]
    total: int
    share: Share

    def alive(self, step: int, taper: float) -> int:
        """Branches that get a token in pass ``step`` (from 0)."""
        if not self.outcomes:
            return 0
        leading = max(1, math.ceil(self.total * taper**step))
        return self.share.count(self.row.slot, leading)

    def goals(self, k: int, taper: float) -> list[int]:
        """How many tokens each branch gets in k passes."""
        alive = [self.alive(step, taper) for step in range(k)]
        return [sum(entry < limit for limit in alive) for entry in range(len(self.outcomes))]


@dataclass(slots=True)
class Tree:
    """All branches of a round.

    Attributes:
        rows: by slot, in batch order.
        number: the leased round whose outcomes they are for, 0 without a lease.
        forked: branches that the GPU chose by itself; ``rows`` is empty then.
        announced: how many of them each slot has, in batch order; none in a leased round.
        q: per pass done, the distributions its tokens were drawn from, float32 [alive, V], or None.
        spans: per pass done, the rows of ``q`` that belong to each slot.
    """

    rows: dict[int, Branches] = field(default_factory=dict)
    q: list[torch.Tensor | None] = field(default_factory=list)
    spans: list[dict[int, slice]] = field(default_factory=list)
    number: int = 0
    forked: int = 0
    announced: dict[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.forked or sum(len(branches.outcomes) for branches in self.rows.values())

    def suffixes(self) -> Suffixes:
        """What each branch says after the committed tokens."""
        return Suffixes(
            [
                (branches.trunk.rules, [*branches.chain[:k], token])
                for branches in self.rows.values()
                for k, token in branches.outcomes
            ]
            if any(branches.trunk.rules is not None for branches in self.rows.values())
            else []
        )

    def distributions(self, slot: int, place: int, depth: int) -> torch.Tensor | None:
        """What the first ``depth`` tokens of a branch were drawn from [depth, V]; None if lost.

        ``place``: its number among this worker's branches of the slot.
        """
        rows = []
        for q, spans in zip(self.q[:depth], self.spans[:depth], strict=True):
            span = spans.get(slot)
            if q is None or span is None or not 0 <= place < span.stop - span.start:
                return None
            rows.append(q[span.start + place])
        return torch.stack(rows) if len(rows) == depth else None


@dataclass(slots=True)
class Suffixes:
    """The branches' tokens, for processors; empty if no row has any."""

    branches: list[tuple[SequenceRules | None, list[int]]]

    def places(self, alive: np.ndarray) -> list[Place]:
        """Of the living branches, numbered as they stand in ``alive``."""
        if not self.branches:
            return []
        return [
            Place(row, rules, suffix)
            for row, (rules, suffix) in enumerate(self.branches[i] for i in alive.tolist())
            if rules is not None
        ]

    def extend(self, alive: np.ndarray, chosen: list[int]) -> None:
        """The living branches got a token each."""
        if self.branches:
            for i, token in zip(alive.tolist(), chosen, strict=True):
                self.branches[i][1].append(token)


class BranchBatches:
    """Makes the ForwardBatch of each pass over a tree.

    Arrays over all branches, rows in tree order; a pass takes those of them that are alive.
    """

    def __init__(
        self, tree: Tree, scratch_start: int, budget: int, k: int, device: torch.device
    ) -> None:
        """``budget`` * ``k`` scratch slots per sequence slot begin at ``scratch_start``; ``budget``
        is this worker's."""
        rows = list(tree.rows.values())
        counts = [len(b.outcomes) for b in rows]
        outcomes = np.array([o for b in rows for o in b.outcomes], np.int64).reshape(-1, 2)
        row_of = np.repeat(np.arange(len(rows)), counts)
        self.rank = np.concatenate([np.arange(count) for count in counts])
        lengths = np.array([len(b.trunk.tokens) for b in rows])
        slots = np.array([b.row.slot for b in rows])
        self._rows = rows
        self._row_of = row_of
        self.tokens = outcomes[:, 1].copy()
        self._start = lengths[row_of] + outcomes[:, 0]
        self._scratch = scratch_start + (slots[row_of] * budget + self.rank) * k
        self._suffix = (self._scratch[:, None] + np.arange(k)).astype(np.int32)
        self._sampling = RowSampling.from_keys([b.trunk.key for b in rows], counts)
        self._tables = torch.from_numpy(stack_tables([b.trunk.table.blocks for b in rows])).to(
            device
        )
        self._device = device

    def alive(self, step: int, taper: float) -> tuple[np.ndarray, dict[int, slice]]:
        """Indices of the branches in pass ``step`` and which of them belong to each slot."""
        limits = [b.alive(step, taper) for b in self._rows]
        spans, end = {}, 0
        for branches, limit in zip(self._rows, limits, strict=True):
            spans[branches.row.slot] = slice(end, end + limit)
            end += limit
        return np.flatnonzero(self.rank < np.array(limits)[self._row_of]), spans

    def batch(self, step: int, alive: np.ndarray) -> ForwardBatch:
        """Feeds ``tokens`` of the living branches at depth ``step``."""

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self._device)

        return ForwardBatch(
            tokens=tensor(self.tokens[alive]),
            positions=tensor(self._start[alive] + step),
            slots=tensor(self._scratch[alive] + step),
            seqs=tensor(self._row_of[alive].astype(np.int32)),
            block_tables=self._tables,
            context_lens=tensor(self._start[alive].astype(np.int32)),
            logit_index=tensor(np.arange(len(alive))),
            suffix_slots=tensor(self._suffix[alive]),
            suffix_lens=tensor(np.full(len(alive), step + 1, np.int32)),
        )

    def chosen_positions(self, step: int, alive: np.ndarray) -> np.ndarray:
        """Positions of the tokens that pass ``step`` chooses."""
        return self._start[alive] + step + 1

    def sampling(self, alive: np.ndarray) -> RowSampling:
        """Sampling settings of the living branches."""
        return self._sampling.take(alive)


def stack_tables(tables: list[list[int]]) -> np.ndarray:
    """Block tables padded with zeros, int32 [R, longest]."""
    stacked = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for i, table in enumerate(tables):
        stacked[i, : len(table)] = table
    return stacked
