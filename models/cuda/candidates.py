"""Noised scores of a row's candidates: its best few tokens, and the token that was fed next.

The best are found by a tournament. Score and token of an entry make one integer whose order is that
of the scores, lower ids first among equals. Blocks of the vocabulary keep their best by bitonic
sorting, then blocks of what was kept do, until one block is left.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.noise import VOCAB_BLOCK, noised_scores, score
from models.cuda.overlap import after_previous, overlap

MOST = 256
"""Most entries a row for which the tournament is played; torch sorts whole rows for more."""

_WORST = tl.constexpr(-(1 << 63))  # stands for no entry: below every packed score


@triton.jit
def pack(value, index):
    """float32 values and int32 indices >= 0 as int64 that order by value, then lower index."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # zero has two signs
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def unpack(packed):
    """What ``pack`` was given."""
    ordered = (packed >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    index = 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)
    return bits.to(tl.float32, bitcast=True), index


@triton.jit
def _first_kernel(
    logits,
    keys,
    inverse_temperature,
    kept,
    vocab,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    value = score(logits, keys, inverse_temperature, row, token, inside, vocab)
    best = tl.topk(tl.where(inside, pack(value, token), _WORST), KEEP)
    tl.store(kept + (row * tl.num_programs(1) + part) * KEEP + tl.arange(0, KEEP), best)


@triton.jit
def _next_kernel(entries, kept, count, BLOCK: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    best = tl.topk(tl.load(entries + row * count + i, mask=i < count, other=_WORST), KEEP)
    tl.store(kept + (row * tl.num_programs(1) + part) * KEEP + tl.arange(0, KEEP), best)


@triton.jit
def _last_kernel(
    entries,
    values,
    tokens,
    count,
    n,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    best = tl.topk(tl.load(entries + row * count + i, mask=i < count, other=_WORST), KEEP)
    value, token = unpack(best)
    rank = tl.arange(0, KEEP)
    tl.store(values + row * n + rank, value, mask=rank < n)
    tl.store(tokens + row * n + rank, token.to(tl.int64), mask=rank < n)


@triton.jit
def _following_kernel(
    logits, keys, inverse_temperature, fed, out, vocab, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    following = row - row % WIDTH + (row + 1) % WIDTH
    token = tl.load(fed + following).to(tl.int32)
    value = score(logits, keys, inverse_temperature, row, token, token < vocab, vocab)
    tl.store(out + row, value)


def best_scores(
    logits: torch.Tensor, keys: torch.Tensor, inverse_temperature: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``n`` best (at most V) noised scores of each row, falling, lower ids first among equals.

    Args:
        logits: [N, V] float32 or bfloat16.
        keys, inverse_temperature: as ``noise.choose`` takes them.

    Returns:
        scores float32 [N, n] and their tokens int64 [N, n].
    """
    logits = logits.contiguous()
    rows, vocab = logits.shape
    n = min(n, vocab)
    if n > MOST or not rows:
        scores = noised_scores(logits, keys, inverse_temperature)
        values, tokens = scores.sort(dim=1, descending=True, stable=True)
        return values[:, :n].contiguous(), tokens[:, :n].contiguous()
    keep = triton.next_power_of_2(n)
    how = {"num_warps": 4, **overlap(logits)}
    block = max(VOCAB_BLOCK, 4 * keep)
    parts = triton.cdiv(vocab, block)
    kept = logits.new_empty((rows, parts * keep), dtype=torch.int64)
    given = (logits, keys, inverse_temperature)
    _first_kernel[(rows, parts)](*given, kept, vocab, block, keep, **how)
    while kept.shape[1] > block:
        count = kept.shape[1]
        parts = triton.cdiv(count, block)
        entries, kept = kept, kept.new_empty((rows, parts * keep))
        _next_kernel[(rows, parts)](entries, kept, count, block, keep, **how)
    values = logits.new_empty((rows, n), dtype=torch.float32)
    tokens = kept.new_empty((rows, n))
    count = kept.shape[1]
    block = triton.next_power_of_2(count)
    _last_kernel[(rows,)](kept, values, tokens, count, n, block, keep, **how)
    return values, tokens


def following_scores(
    logits: torch.Tensor,
    keys: torch.Tensor,
    inverse_temperature: torch.Tensor,
    fed: torch.Tensor,
) -> torch.Tensor:
    """Noised scores that each fed token gives the one fed next in its row, float32 [R, W]; the
    last of a row looks at the row's first, for want of another.

    Args:
        logits: [R * W, V], keys and inverse_temperature [R * W] likewise.
        fed: int64 [R, W].
    """
    logits = logits.contiguous()
    out = torch.empty(fed.shape, dtype=torch.float32, device=logits.device)
    given = (logits, keys, inverse_temperature)
    vocab = logits.shape[1]
    _following_kernel[(fed.numel(),)](
        *given, fed, out, vocab, fed.shape[1], num_warps=1, **overlap(logits)
    )
    return out
