"""Paged attention for decoding, verification, branches and prefill, in one kernel family.

A program serves one tile of tokens of one sequence, the query heads of one KV head, and one split
of the positions, so that a sequence's K and V are read once for all its tokens (flash-decoding:
Dao et al. 2023; online softmax: Milakov, Gimelshein, arXiv 1805.02867). Splits are cut by position
at fixed places; a token's result thus depends neither on the other rows of the batch nor on how
long the longest of them is. The branches' own tokens are one more split, beside the trunk's. Long
prefills run unsplit, with the same masks.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.batch import ForwardBatch
from models.cuda.overlap import after_previous, overlap
from models.cuda.tiles import Tiles

REDUCED_TOGETHER = 16
"""Splits merged at a time, whatever their number, so that the order of sums is always the same."""
_LOG2E = 1.4426950408889634


@triton.jit
def _fold(scores, values, peak, total, acc):
    """One step of online softmax: scores [M, N] (base 2, -inf where hidden), values [N, D]."""
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    # A row that has seen nothing yet has no finite peak; exp2(-inf - 0) = 0 keeps it empty.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    keep = tl.exp2(peak - base)
    total = total * keep + tl.sum(weights, axis=1)
    acc = acc * keep[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _attention_kernel(
    q,
    k_cache,
    v_cache,
    out,
    part_acc,
    part_peak,
    part_total,
    order,
    tile_seq,
    tile_start,
    tile_length,
    tables,
    context_lens,
    suffix_slots,
    suffix_lens,
    scale,
    num_tokens,
    split_size,
    table_stride,
    suffix_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_P: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    DIRECT: tl.constexpr,
    ORDERED: tl.constexpr,
    SUFFIX: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(tile_length + tile)
    if length == 0:
        return
    start = tl.load(tile_start + tile)
    row = tl.arange(0, ROWS)
    member, lane = row // GROUP_P, row % GROUP_P
    exists = member < length
    live = exists & (lane < GROUP)
    token = start + member
    if ORDERED:
        token = tl.load(order + token, mask=exists, other=0)
    context = tl.load(context_lens + token, mask=exists, other=0)
    longest = tl.max(context, axis=0)
    low = split * split_size
    high = longest
    in_suffix = split == 0
    beyond = (split > 0) & (low >= longest)
    if not DIRECT:
        high = tl.minimum(longest, low + split_size)
        if SUFFIX:
            in_suffix = split == tl.num_programs(2) - 1
            high = tl.where(in_suffix, low, high)
            beyond = beyond & (split < tl.num_programs(2) - 1)
    if beyond:
        return
    d = tl.arange(0, DIM_P)
    in_dim = d < DIM
    query_at = (token.to(tl.int64) * HEADS + head * GROUP + lane) * DIM
    query = tl.load(
        q + query_at[:, None] + d[None, :], mask=live[:, None] & in_dim[None, :], other=0.0
    )
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_P), tl.float32)
    table = tables + tl.load(tile_seq + tile).to(tl.int64) * table_stride
    for first in range(low, high, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        there = position < high
        block = tl.load(table + position // PAGE, mask=there, other=0).to(tl.int64)
        at = ((block * PAGE + position % PAGE) * KV_HEADS + head) * DIM
        keys = tl.load(
            k_cache + at[None, :] + d[:, None], mask=there[None, :] & in_dim[:, None], other=0.0
        )
        values = tl.load(
            v_cache + at[:, None] + d[None, :], mask=there[:, None] & in_dim[None, :], other=0.0
        )
        scores = tl.dot(query, keys, input_precision="ieee") * scale
        seen = (position[None, :] < context[:, None]) & there[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        peak, total, acc = _fold(scores, values, peak, total, acc)
    if SUFFIX:  # noqa: SIM102 (decided at compile time)
        if in_suffix:
            own = tl.load(suffix_lens + token, mask=exists, other=0)
            # Keys of all the tile's suffixes, slot j of every token before slot j + 1 of any.
            for first in range(0, tl.max(own, axis=0) * WIDTH, BLOCK_N):
                n = first + tl.arange(0, BLOCK_N)
                owner, j = n % WIDTH, n // WIDTH
                owned = owner < length
                owner_token = start + owner
                if ORDERED:
                    owner_token = tl.load(order + owner_token, mask=owned, other=0)
                owner_length = tl.load(suffix_lens + owner_token, mask=owned, other=0)
                there = owned & (j < owner_length)
                slot = tl.load(
                    suffix_slots + owner_token.to(tl.int64) * suffix_stride + j,
                    mask=there,
                    other=0,
                ).to(tl.int64)
                at = (slot * KV_HEADS + head) * DIM
                keys = tl.load(
                    k_cache + at[None, :] + d[:, None],
                    mask=there[None, :] & in_dim[:, None],
                    other=0.0,
                )
                values = tl.load(
                    v_cache + at[:, None] + d[None, :],
                    mask=there[:, None] & in_dim[None, :],
                    other=0.0,
                )
                scores = tl.dot(query, keys, input_precision="ieee") * scale
                seen = (owner[None, :] == member[:, None]) & there[None, :]
                scores = tl.where(seen, scores, float("-inf"))
                peak, total, acc = _fold(scores, values, peak, total, acc)
    if DIRECT:
        # A padded token has seen nothing: 0 / 1, not 0 / 0.
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(
            out + query_at[:, None] + d[None, :],
            result.to(out.dtype.element_ty),
            mask=live[:, None] & in_dim[None, :],
        )
    else:
        part = (split.to(tl.int64) * num_tokens + token) * HEADS + head * GROUP + lane
        tl.store(part_peak + part, peak, mask=live)
        tl.store(part_total + part, total, mask=live)
        tl.store(
            part_acc + part[:, None] * DIM + d[None, :],
            acc,
            mask=live[:, None] & in_dim[None, :],
        )


@triton.jit
def _reduce_kernel(
    part_acc,
    part_peak,
    part_total,
    out,
    context_lens,
    num_tokens,
    split_size,
    suffix_split,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    CHUNK: tl.constexpr,
    SUFFIX: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context = tl.load(context_lens + token)
    splits = tl.maximum((context + split_size - 1) // split_size, 1)
    d = tl.arange(0, DIM_P)
    in_dim = d < DIM
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros((DIM_P,), tl.float32)
    if SUFFIX:
        own = (suffix_split.to(tl.int64) * num_tokens + token) * HEADS + head
        peak = tl.load(part_peak + own)
        total = tl.load(part_total + own)
        acc = tl.load(part_acc + own * DIM + d, mask=in_dim, other=0.0)
    for first in range(0, splits, CHUNK):
        split = first + tl.arange(0, CHUNK)
        there = split < splits
        part = (split.to(tl.int64) * num_tokens + token) * HEADS + head
        peaks = tl.load(part_peak + part, mask=there, other=float("-inf"))
        totals = tl.load(part_total + part, mask=there, other=0.0)
        accs = tl.load(
            part_acc + part[:, None] * DIM + d[None, :],
            mask=there[:, None] & in_dim[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        keep = tl.exp2(peak - base)
        weights = tl.exp2(peaks - base)
        total = total * keep + tl.sum(totals * weights, axis=0)
        acc = acc * keep + tl.sum(accs * weights[:, None], axis=0)
        peak = new_peak
    result = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out + (token * HEADS + head) * DIM + d, result.to(out.dtype.element_ty), mask=in_dim)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: ForwardBatch,
    tiles: Tiles,
    scale: float,
    split: int,
) -> torch.Tensor:
    """q [T, heads, dim], caches [blocks, page, kv_heads, dim] -> [T, heads * dim], q's dtype.

    ``split``: positions of a split, 0 = unsplit. Tokens without context and suffix give zeros.
    """
    q = q.contiguous()
    tokens, heads, dim = q.shape
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    out = torch.empty_like(q)
    if not tokens:
        return out.view(tokens, heads * dim)
    longest = batch.block_tables.shape[1] * page
    direct = split <= 0 or longest <= split
    splits = 1 if direct else triton.cdiv(longest, split)
    suffix = batch.suffix_slots if batch.suffix_lens is not None else None
    grid_splits = splits + (not direct and suffix is not None)
    parts = (out, out, out)
    if not direct:
        shape = (grid_splits, tokens, heads)
        parts = (
            torch.empty((*shape, dim), dtype=torch.float32, device=q.device),
            torch.empty(shape, dtype=torch.float32, device=q.device),
            torch.empty(shape, dtype=torch.float32, device=q.device),
        )
    group = triton.next_power_of_2(heads // kv_heads)
    rows = tiles.width * group
    dim_p = max(16, triton.next_power_of_2(dim))
    block_n = 64
    if q.dtype == torch.float32 or dim_p > 128:
        block_n = 32 if dim_p <= 64 else 16
    order = tiles.order
    _attention_kernel[(tiles.seq.shape[0], kv_heads, grid_splits)](
        q,
        k_cache,
        v_cache,
        out,
        *parts,
        tiles.seq if order is None else order,
        tiles.seq,
        tiles.start,
        tiles.length,
        batch.block_tables,
        batch.context_lens,
        batch.context_lens if suffix is None else suffix,
        batch.context_lens if suffix is None else batch.suffix_lens,
        scale * _LOG2E,
        tokens,
        max(split, 0),
        batch.block_tables.stride(0),
        0 if suffix is None else suffix.stride(0),
        heads,
        kv_heads,
        group,
        dim,
        dim_p,
        tiles.width,
        rows,
        block_n,
        page,
        direct,
        order is not None,
        suffix is not None,
        num_warps=8 if rows >= 128 else 4,
        num_stages=2,
        **overlap(q),
    )
    if not direct:
        _reduce_kernel[(tokens, heads)](
            *parts,
            out,
            batch.context_lens,
            tokens,
            split,
            splits,
            heads,
            dim,
            dim_p,
            REDUCED_TOGETHER,
            suffix is not None,
            num_warps=4 if dim_p > 64 else 2,
            **overlap(q),
        )
    return out.view(tokens, heads * dim)
