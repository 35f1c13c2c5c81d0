"""What the draft's graphs are fed, made from the rows of a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.cuda.graphs import StepRow
from models.cuda.tree_inputs import TreeHome, TreeInputs
from ssd_pipe.drafting.tree import Branches, Tree
from ssd_pipe.drafting.trunk import Feed
from ssd_pipe.sampling.noise import SHARED, row_keys


def step_rows(feeds: Sequence[Feed]) -> list[StepRow]:
    """Rows of a draft's pass as graphs want them."""
    return [
        StepRow(trunk.table.blocks, start, tokens, trunk.key.seed, trunk.key.temperature)
        for trunk, start, tokens, _ in feeds
    ]


def tree_inputs(tree: Tree, k: int, budget: int, scratch_start: int) -> TreeInputs:
    """The branches of a tree, in its order, ``k`` tokens each.

    Args:
        budget: branches a row has room for.
        scratch_start: first flat KV slot of the branches' scratch region.
    """
    rows = list(tree.rows.values())
    counts = [len(row.outcomes) for row in rows]
    outcomes = np.array([o for row in rows for o in row.outcomes], np.int64).reshape(-1, 2)
    seqs = np.repeat(np.arange(len(rows)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    start = np.array([len(row.trunk.tokens) for row in rows])[seqs] + outcomes[:, 0]
    slots = np.array([row.row.slot for row in rows])[seqs]
    temperature = np.array([row.trunk.key.temperature for row in rows])[seqs]
    keys = np.zeros((k, len(start)), np.uint64)
    if temperature.any():
        seeds = np.array([row.trunk.key.seed for row in rows], np.uint64)[seqs]
        keys = row_keys(seeds, start + 1 + np.arange(k)[:, None], SHARED)
    return TreeInputs(
        tokens=outcomes[:, 1],
        positions=start,
        context_lens=start,
        seqs=seqs,
        tables=[row.trunk.table.blocks for row in rows],
        scratch=scratch_start + (slots * budget + rank) * k,
        keys=keys,
        temperature=temperature,
        home=_home(rows, outcomes, tree.number) if tree.number else None,
    )


def _home(rows: list[Branches], outcomes: np.ndarray, number: int) -> TreeHome:
    return TreeHome(
        number,
        homes=np.array([row.row.slot for row in rows]),
        hashes=np.array([row.row.prefix_hash for row in rows], np.uint64),
        outcomes=outcomes[:, 0] << 32 | outcomes[:, 1],
    )
