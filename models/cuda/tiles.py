"""Which tokens attend together: tiles of tokens of one sequence, which share each read of its KV.

Layouts are made without a host synchronisation: from the bucket's shape where a graph fixes it,
else by a few device operations on ``seqs``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from models.batch import ForwardBatch


@dataclass(slots=True)
class Tiles:
    """Tile i holds tokens ``order[start[i] : start[i] + length[i]]`` of sequence ``seq[i]``.

    Attributes:
        seq, start, length: int32 [tiles]; length 0 is a tile that does nothing.
        width: most tokens a tile holds, a power of two.
        order: int32 [T], or None for the batch's own order.
    """

    seq: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    width: int
    order: torch.Tensor | None = None


@dataclass(slots=True)
class StaticBatch(ForwardBatch):
    """A ForwardBatch whose layout is fixed, as in a CUDA graph. ``tiles`` must not be None."""

    tiles: Tiles | None = None


def fixed_tiles(rows: int, per_row: int, width: int, device: torch.device) -> Tiles:
    """Tiles of ``rows`` sequences of ``per_row`` consecutive tokens each."""
    offsets = torch.arange(0, per_row, width, dtype=torch.int32)
    lengths = (per_row - offsets).clamp(max=width)
    seq = torch.arange(rows, dtype=torch.int32)
    start = seq[:, None] * per_row + offsets
    return Tiles(
        seq.repeat_interleave(len(offsets)).to(device),
        start.reshape(-1).to(device),
        lengths.repeat(rows).to(device),
        width,
    )


def tiles_of(seqs: torch.Tensor, rows: int, width: int) -> Tiles:
    """Tiles of tokens that belong to ``seqs`` int32 [T] (any order) of ``rows`` sequences."""
    tokens, device = seqs.shape[0], seqs.device
    ordered, order = torch.sort(seqs, stable=True)
    edges = torch.searchsorted(ordered, torch.arange(rows + 1, dtype=torch.int32, device=device))
    first, counts = edges[:-1], edges[1:] - edges[:-1]
    per_seq = (counts + (width - 1)) // width
    stops = per_seq.cumsum(0)
    number = torch.arange(min(tokens, -(-tokens // width) + rows), device=device)
    seq = torch.searchsorted(stops, number, right=True).clamp_(max=rows - 1)
    offset = (number - (stops - per_seq)[seq]) * width
    length = (counts[seq] - offset).clamp_(min=0, max=width)
    start = first[seq] + offset
    return Tiles(seq.int(), start.int(), length.int(), width, order.int())


def tile_width(
    tokens: int, heads: int, kv_heads: int, dtype: torch.dtype, branches: bool = False
) -> int:
    """Tokens of a tile, for sequences of about ``tokens`` tokens each: a power of two, whose
    product with the padded group of query heads is 32, so that a token gets the same from a step of
    any number of tokens, and up to 128 in prompts (more than 32 tokens).

    float32 has no tensor cores here and stops at 32, or its products fill the register file. So do
    ``branches``, as every tile of theirs looks at all its members' own tokens: 24 of them after 512
    positions took 7 us a layer of the 1B shape in tiles of 8, and 11 us in one of 32.
    """
    group = _power_of_two(heads // kv_heads)
    least = max(1, 32 // group)
    if branches or tokens <= 32 or dtype == torch.float32:
        return least
    return max(least, min(_power_of_two(tokens), 128 // group))


def _power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << max(0, n - 1).bit_length()
