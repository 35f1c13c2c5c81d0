"""The layer operations in plain torch: any device, float32 or bfloat16; right first, then fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.nn import functional

from models.batch import ForwardBatch


class ReferenceBackend:
    """Backend protocol on torch's own operators.

    ``pack`` keeps the matrix in the activation dtype, so a bfloat16 checkpoint takes twice its
    size under float32 arithmetic.

    Attributes:
        fallback: why a faster backend, which was to be taken, is not; empty if none was.
    """

    name = "reference"
    sampling = None

    def __init__(
        self, device: torch.device | str, activation_dtype: torch.dtype, fallback: str = ""
    ) -> None:
        self.fallback = fallback
        self.device = torch.device(device)
        self.activation_dtype = activation_dtype

    def pack(self, weight: torch.Tensor) -> object:
        return weight.to(self.device, self.activation_dtype)

    def first_rows(self, weight: object, count: int) -> object:
        return cast(torch.Tensor, weight)[:count]

    def linear(self, x: torch.Tensor, weight: object, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, cast(torch.Tensor, weight), bias)

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, table).to(self.activation_dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed = functional.rms_norm(x.float(), (x.shape[-1],), weight, eps)
        return normed.to(self.activation_dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def gated_linear(
        self, x: torch.Tensor, weight: object, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self.silu_mul(self.linear(x, weight, bias))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2I] -> silu(first half) * second half, [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def rope_and_store(
        self,
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
        plan = _plan_of(batch, k_cache.shape[1])
        if plan.rotary is None or plan.rotary.table is not cos:
            plan.rotary = _Rotary(cos, cos[batch.positions, None], sin[batch.positions, None])
        rotary = plan.rotary
        q, k, v = qkv.view(qkv.shape[0], -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps)
        k_cache.view(-1, kv_heads, head_dim).index_copy_(0, batch.slots, self._rotate(k, rotary))
        v_cache.view(-1, kv_heads, head_dim).index_copy_(0, batch.slots, v)
        return self._rotate(q, rotary)

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
    ) -> torch.Tensor:
        plan = _plan_of(batch, k_cache.shape[1])
        tokens, heads, dim = q.shape
        kv_heads = k_cache.shape[2]
        keys, values = k_cache.view(-1, kv_heads, dim), v_cache.view(-1, kv_heads, dim)
        grouped = q.view(tokens, kv_heads, heads // kv_heads, dim)
        out = torch.empty_like(grouped)
        for view in plan.views:
            out[view.tokens] = _attend(grouped[view.tokens], keys, values, view, scale)
        return out.view(tokens, heads * dim)

    def _rotate(self, x: torch.Tensor, rotary: _Rotary) -> torch.Tensor:
        cos, sin = rotary.cos, rotary.sin
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned, dim=-1).to(self.activation_dtype)


@dataclass(slots=True)
class _View:
    """One sequence's tokens of a batch and the N cache slots they see between them.

    ``tokens`` is a slice where they lie together, else int64 [t]; ``mask`` bool [t, N], or None if
    every token sees every slot.
    """

    tokens: slice | torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(slots=True)
class _Rotary:
    """Rows of the tables at the batch's positions, float32 [T, 1, head_dim / 2]."""

    table: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(slots=True)
class _Plan:
    """What every layer of one forward shares; the first layer makes it."""

    block_size: int
    views: list[_View]
    rotary: _Rotary | None = None


def _plan_of(batch: ForwardBatch, block_size: int) -> _Plan:
    plan = batch.plan
    if not isinstance(plan, _Plan) or plan.block_size != block_size:
        plan = batch.plan = _Plan(block_size, _views(batch, block_size))
    return plan


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: _View, scale: float
) -> torch.Tensor:
    """q [t, kv_heads, group, dim] -> the same shape. The group's heads share K and V, so they
    are more query rows of one head."""
    t, kv_heads, group, dim = q.shape
    k, v = (cache[view.slots].transpose(0, 1).unsqueeze(0) for cache in (keys, values))
    rows = q.permute(1, 2, 0, 3).reshape(1, kv_heads, group * t, dim)
    mask = None if view.mask is None else view.mask.repeat(group, 1)
    out = functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    return out.view(kv_heads, group, t, dim).permute(2, 0, 1, 3)


def _views(batch: ForwardBatch, block_size: int) -> list[_View]:
    """One view per sequence. The slots are the context's, then the suffix of every branch token
    in turn; of these last a token sees only its own."""
    device = batch.tokens.device
    members: dict[int, list[int]] = {}
    for index, row in enumerate(batch.seqs.tolist()):
        members.setdefault(row, []).append(index)
    lens = batch.context_lens.tolist()
    suffixes = None if batch.suffix_lens is None else batch.suffix_lens.tolist()
    views = []
    for row, indices in members.items():
        first, stop = indices[0], indices[-1] + 1
        together = stop - first == len(indices)
        where = slice(first, stop) if together else torch.tensor(indices, device=device)
        context = max(lens[i] for i in indices)
        blocks = batch.block_tables[row, : -(-context // block_size)].long()
        offsets = torch.arange(block_size, device=device)
        slots = (blocks.unsqueeze(1) * block_size + offsets).view(-1)[:context]
        mask = None
        if min(lens[i] for i in indices) < context:
            mask = torch.arange(context, device=device) < batch.context_lens[where].unsqueeze(1)
        if suffixes is not None and any(suffixes[i] for i in indices):
            slots, mask = _with_suffixes(batch, where, slots, mask)
        views.append(_View(where, slots, mask))
    return views


def _with_suffixes(
    batch: ForwardBatch,
    where: slice | torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots [context + n] and mask [t, context + n], n the suffix slots of all t tokens."""
    if batch.suffix_slots is None or batch.suffix_lens is None:
        raise ValueError("ForwardBatch: suffix_slots and suffix_lens must be given together")
    lens, table = batch.suffix_lens[where], batch.suffix_slots[where]
    t, width = table.shape
    used = torch.arange(width, device=table.device) < lens.unsqueeze(1)
    owner = torch.arange(t, device=table.device).unsqueeze(1).expand(t, width)[used]
    own = owner == torch.arange(t, device=table.device).unsqueeze(1)
    if mask is None:
        mask = own.new_ones((t, slots.shape[0]))
    return torch.cat((slots, table[used].long())), torch.cat((mask, own), dim=1)
