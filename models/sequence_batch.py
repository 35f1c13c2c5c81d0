"""Builds the ForwardBatch of a step over whole sequences (trunk tokens, no branches)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from models.batch import ForwardBatch, RowLayout

BlockTable = Sequence[int] | npt.NDArray[np.integer]


class BatchRow(NamedTuple):
    """One sequence's part of a step.

    ``tokens`` are fed at positions ``start``.. and written through ``block_table`` (an int32 array
    is taken up faster than a list). Logits are wanted from ``want_logits_from`` (an index into
    ``tokens``) on; len(tokens) wants none.
    """

    block_table: BlockTable
    start: int
    tokens: Sequence[int]
    want_logits_from: int


def build_batch(
    rows: Sequence[BatchRow | tuple[BlockTable, int, Sequence[int], int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> ForwardBatch:
    """One flat batch, rows in order. ``logit_index`` follows the same order.

    Raises ValueError if a row is empty or its block table does not reach its last token.
    """
    counts = [len(row[2]) for row in rows]
    if not rows or not all(counts):
        raise ValueError("every row of a batch needs at least one token")
    tables = np.zeros((len(rows), max(len(row[0]) for row in rows)), np.int32)
    flat: list[int] = []
    wanted: list[int] = []
    shifts = []
    for index, (table, start, tokens, first) in enumerate(rows):
        if start + len(tokens) > len(table) * block_size:
            raise ValueError(
                f"row {index}: {len(table)} blocks of {block_size} do not hold position "
                f"{start + len(tokens) - 1}"
            )
        tables[index, : len(table)] = table
        shifts.append(start - len(flat))
        wanted.extend(range(len(flat) + first, len(flat) + len(tokens)))
        flat.extend(tokens)
    seqs = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    positions = np.arange(len(flat)) + np.array(shifts)[seqs]
    block, offset = np.divmod(positions, block_size)
    slots = tables[seqs, block].astype(np.int64) * block_size + offset
    arrays = (
        np.array(flat, np.int64),
        positions,
        slots,
        seqs,
        tables,
        (positions + 1).astype(np.int32),
        np.array(wanted, np.int64),
    )
    tensors = [torch.from_numpy(array) for array in arrays]
    if torch.device(device).type != "cpu":
        tensors = [tensor.to(device, non_blocking=True) for tensor in tensors]
    stops = positions[np.cumsum(counts) - 1] + 1
    return ForwardBatch(*tensors, layout=RowLayout(np.array(counts), stops, tables))
