"""Gumbel noise and its argmax on the device, for the row keys of ``ssd_pipe.sampling.noise``.

The same hash and the same formula; log1p is taken by Kahan's identity, so noise agrees with torch's
to float32 rounding.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.overlap import after_previous, overlap

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MUL1 = tl.constexpr(0xBF58476D1CE4E5B9)
MUL2 = tl.constexpr(0x94D049BB133111EB)

VOCAB_BLOCK = 1024


@triton.jit
def finalise(z):
    """SplitMix64's finaliser on uint64."""
    z = (z ^ (z >> 30)) * tl.full((), MUL1, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), MUL2, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def mix_key(z, word):
    """One more word of a row key: uint64 state, int64 word."""
    golden = tl.full((), GOLDEN, tl.uint64)
    return finalise(z + (word.to(tl.uint64) + 1) * golden)


@triton.jit
def gumbel(key, token):
    """Noise of uint64 ``key`` at int32 ``token`` ids, float32."""
    golden = tl.full((), GOLDEN, tl.uint64)
    z = finalise(key + (token.to(tl.uint64) + 1) * golden)
    u = ((z >> 32).to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.9999999403953552)
    # -log1p(-u) = -u log(w) / (1 - w) with w the rounded 1 - u (Kahan); u itself where w is 1.
    w = 1.0 - u
    near = w == 1.0
    e = tl.where(near, u, -u * tl.log(w) / tl.where(near, 1.0, 1.0 - w))
    return -tl.log(e)


@triton.jit
def score(logits, keys, inverse_temperature, row, token, inside, vocab):
    """Noised scores of one row: logits / T + g, or the logits where 1 / T is given as 0."""
    value = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf")).to(tl.float32)
    factor = tl.load(inverse_temperature + row)
    if factor != 0.0:
        value = value * factor + gumbel(tl.load(keys + row).to(tl.uint64), token)
    return tl.where(inside, value, float("-inf"))


@triton.jit
def _partial_argmax_kernel(
    logits,
    keys,
    inverse_temperature,
    best,
    best_id,
    vocab,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    value = score(logits, keys, inverse_temperature, row, token, token < vocab, vocab)
    peak, at = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    where = row * tl.num_programs(1) + part
    tl.store(best + where, peak)
    tl.store(best_id + where, part * BLOCK + at)


@triton.jit
def _final_argmax_kernel(best, best_id, out, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    value = tl.load(best + row * parts + i, mask=i < parts, other=float("-inf"))
    # Parts lie in the order of their ids, so the leftmost of equals is the lowest id.
    _, at = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(best_id + row * parts + at).to(tl.int64))


@triton.jit
def _scores_kernel(
    logits, keys, inverse_temperature, out, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    value = score(logits, keys, inverse_temperature, row, token, inside, vocab)
    tl.store(out + row * vocab + token, value, mask=inside)


def choose(
    logits: torch.Tensor,
    keys: torch.Tensor,
    inverse_temperature: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """argmax(logits / T + g) of each row, the lowest id on ties.

    Args:
        logits: [N, V] float32 or bfloat16, contiguous.
        keys: int64 [N] row keys.
        inverse_temperature: float32 [N], 1 / T; 0 = a greedy row, scored by its logits.
        out: int64 [N] to write to.

    Returns:
        int64 [N].
    """
    logits = logits.contiguous()
    rows, vocab = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    parts = triton.cdiv(vocab, VOCAB_BLOCK)
    best = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _partial_argmax_kernel[(rows, parts)](
        logits,
        keys,
        inverse_temperature,
        best,
        best_id,
        vocab,
        VOCAB_BLOCK,
        num_warps=4,
        **overlap(logits),
    )
    block = triton.next_power_of_2(parts)
    _final_argmax_kernel[(rows,)](best, best_id, out, parts, block, num_warps=1, **overlap(logits))
    return out


def noised_scores(
    logits: torch.Tensor, keys: torch.Tensor, inverse_temperature: torch.Tensor
) -> torch.Tensor:
    """The scores ``choose`` takes the argmax of, float32 [N, V]."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    if rows:
        _scores_kernel[(rows, triton.cdiv(vocab, VOCAB_BLOCK))](
            logits,
            keys,
            inverse_temperature,
            out,
            vocab,
            VOCAB_BLOCK,
            num_warps=4,
            **overlap(logits),
        )
    return out
