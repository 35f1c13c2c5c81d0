"""Kernels that derive a step's metadata on the device, so that a graph needs few inputs."""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.noise import mix_key
from models.cuda.overlap import after_previous, overlap


@triton.jit
def _expand_rows_kernel(
    starts,
    counts,
    tables,
    seeds,
    streams,
    row_factors,
    positions,
    slots,
    context_lens,
    keys,
    factors,
    table_stride,
    WIDTH: tl.constexpr,
    WIDTH_P: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH_P)
    inside = i < WIDTH
    live = i < tl.load(counts + row)
    position = tl.load(starts + row) + i
    block = tl.load(tables + row * table_stride + position // PAGE, mask=live, other=0)
    at = row * WIDTH + i
    tl.store(positions + at, tl.where(live, position, 0), mask=inside)
    slot = block.to(tl.int64) * PAGE + position % PAGE
    tl.store(slots + at, tl.where(live, slot, -1), mask=inside)
    tl.store(context_lens + at, tl.where(live, position + 1, 0).to(tl.int32), mask=inside)
    stream = tl.load(streams + at, mask=inside, other=0)
    key = mix_key(tl.zeros_like(stream).to(tl.uint64), tl.load(seeds + row) + tl.zeros_like(stream))
    key = mix_key(mix_key(key, position + 1), stream)
    tl.store(keys + at, key.to(tl.int64), mask=inside)
    factor = tl.load(row_factors + row) + tl.zeros((WIDTH_P,), tl.float32)
    tl.store(factors + at, factor, mask=inside)


@triton.jit
def _expand_tree_kernel(
    first_positions,
    first_slots,
    live,
    positions,
    slots,
    suffix_slots,
    suffix_lens,
    branches,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    branch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = branch < branches
    alive = tl.load(live + branch, mask=inside, other=0) != 0
    position = tl.load(first_positions + branch, mask=inside, other=0)
    slot = tl.load(first_slots + branch, mask=inside, other=0)
    for step in range(STEPS):
        at = step * branches + branch
        tl.store(positions + at, tl.where(alive, position + step, 0), mask=inside)
        tl.store(slots + at, tl.where(alive, slot + step, -1), mask=inside)
        length = tl.where(alive, step + 1, 0)
        tl.store(suffix_lens + at, length.to(tl.int32), mask=inside)
        to = suffix_slots + branch * STEPS + step
        tl.store(to, (slot + step).to(tl.int32), mask=inside)


def expand_rows(
    starts: torch.Tensor,
    counts: torch.Tensor,
    tables: torch.Tensor,
    seeds: torch.Tensor,
    streams: torch.Tensor,
    row_factors: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    page: int,
) -> None:
    """Metadata of R rows of up to W consecutive tokens each.

    Args:
        starts: int64 [R], position of a row's first token.
        counts: int32 [R], tokens of the row; the rest of its W are padding (slot -1, context 0).
        tables: int32 [R, max_blocks].
        seeds: int64 [R] (the bits of the noise seed); streams: int64 [R, W].
        row_factors: float32 [R], 1 / T, 0 = greedy.
        outputs: positions int64, slots int64, context_lens int32, keys int64 and factors float32,
            each [R * W]. The key of a token is that of the choice it leads to, at its
            position + 1.
        page: positions a block holds.
    """
    rows, width = streams.shape
    _expand_rows_kernel[(rows,)](
        starts,
        counts,
        tables,
        seeds,
        streams,
        row_factors,
        *outputs,
        tables.stride(0),
        width,
        triton.next_power_of_2(width),
        page,
        num_warps=1,
        **overlap(starts),
    )


def expand_tree(
    first_positions: torch.Tensor,
    first_slots: torch.Tensor,
    live: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    steps: int,
) -> None:
    """Metadata of all steps of a tree of B branches.

    Args:
        first_positions, first_slots: int64 [B] of each branch's first token; the slots of the
            following ones are consecutive.
        live: int32 [B], 0 = padding.
        outputs: positions int64 [K, B], slots int64 [K, B], suffix_slots int32 [B, K],
            suffix_lens int32 [K, B].
        steps: K.
    """
    branches = live.shape[0]
    block = min(128, triton.next_power_of_2(branches))
    _expand_tree_kernel[(triton.cdiv(branches, block),)](
        first_positions,
        first_slots,
        live,
        *outputs,
        branches,
        steps,
        block,
        num_warps=1,
        **overlap(live),
    )
