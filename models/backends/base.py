"""The operations a device offers to the model code; one implementation per kind of device."""

from __future__ import annotations

from typing import Protocol

import torch

from models.batch import ForwardBatch


class Backend(Protocol):
    """Operations of one decoder layer and of the head.

    Activations ``x`` are [T, width] in ``activation_dtype`` (float32 or bfloat16). A *weight* is
    whatever ``pack`` returned; the model code never looks inside. KV caches of one layer are
    [num_blocks, block_size, kv_heads, head_dim].
    """

    name: str
    device: torch.device
    activation_dtype: torch.dtype

    def pack(self, weight: torch.Tensor) -> object:
        """Bring a [out, in] matrix into the form ``linear`` wants (stored dtype is kept)."""

    def linear(self, x: torch.Tensor, weight: object, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] -> [T, out] in activation_dtype."""

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of ``table`` [V, H] for int64 [T] -> [T, H] in activation_dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, statistics in float32."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2I] -> silu(first half) * second half, [T, I]."""

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
        """Split qkv [T, (heads + 2 kv_heads) head_dim], norm q and k per head if asked, rotate q
        and k (half-split convention; cos, sin float32 [max_positions, head_dim / 2]), write K and V
        to ``batch.slots``; returns q [T, heads, head_dim]."""

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
    ) -> torch.Tensor:
        """Paged attention with the visibility ForwardBatch defines -> [T, heads * head_dim]."""
