"""One kernel between the QKV product and attention: QK norm, rotation, and the KV write."""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.batch import ForwardBatch
from models.cuda.overlap import after_previous, overlap


@triton.jit
def _rope_store_kernel(
    qkv,
    q,
    k_cache,
    v_cache,
    positions,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_P: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # q heads, then k heads, then v heads
    HALF: tl.constexpr = DIM // 2
    i = tl.arange(0, HALF_P)
    inside = i < HALF
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM + i
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    slot = tl.load(slots + token)
    if head >= HEADS + KV_HEADS:
        # A negative slot marks a padded token, which must leave the cache alone.
        if slot >= 0:
            to = v_cache + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM + i
            tl.store(to, first, mask=inside)
            tl.store(to + HALF, second, mask=inside)
    else:
        a, b = first.to(tl.float32), second.to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / DIM + eps)
            weight = q_norm
            if head >= HEADS:
                weight = k_norm
            a = a * scale * tl.load(weight + i, mask=inside, other=0.0)
            b = b * scale * tl.load(weight + HALF + i, mask=inside, other=0.0)
            a = a.to(first.dtype).to(tl.float32)
            b = b.to(first.dtype).to(tl.float32)
        position = tl.load(positions + token)
        c = tl.load(cos + position * HALF + i, mask=inside, other=0.0)
        s = tl.load(sin + position * HALF + i, mask=inside, other=0.0)
        turned, other = (a * c - b * s).to(first.dtype), (b * c + a * s).to(first.dtype)
        if head < HEADS:
            to = q + (token * HEADS + head) * DIM + i
            tl.store(to, turned, mask=inside)
            tl.store(to + HALF, other, mask=inside)
        elif slot >= 0:
            to = k_cache + (slot * KV_HEADS + head - HEADS) * DIM + i
            tl.store(to, turned, mask=inside)
            tl.store(to + HALF, other, mask=inside)


def rope_and_store(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    batch: ForwardBatch,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """See ``Backend.rope_and_store``; tokens with a negative slot write no K and V."""
    qkv = qkv.contiguous()
    tokens = qkv.shape[0]
    q = qkv.new_empty((tokens, heads, head_dim))
    if not tokens:
        return q
    normed = q_norm is not None and k_norm is not None
    _rope_store_kernel[(tokens, heads + 2 * kv_heads)](
        qkv,
        q,
        k_cache,
        v_cache,
        batch.positions,
        batch.slots,
        cos,
        sin,
        q_norm if normed else cos,
        k_norm if normed else cos,
        eps,
        heads,
        kv_heads,
        head_dim,
        triton.next_power_of_2(head_dim // 2),
        normed,
        num_warps=1,
        **overlap(qkv),
    )
    return q
