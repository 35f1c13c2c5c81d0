"""The operations a device offers to the model code; one implementation per kind of device."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from models.batch import ForwardBatch

AttentionKind = Literal["auto", "triton", "flashinfer"]


class SamplingKernels(Protocol):
    """Compiled sampling of one device; a backend without it leaves that to torch.

    Scores are ``logits * inverse_temperature + Gumbel noise`` with the noise of
    ``ssd_pipe.sampling.noise`` under int64 row keys [N]; ``inverse_temperature`` is float32 [N], 0
    marks a greedy row, scored by its plain logits. Equal scores go to the lower token id.
    """

    def head_argmax(
        self,
        hidden: torch.Tensor,
        weight: object,
        inverse_temperature: torch.Tensor,
        row_keys: torch.Tensor,
        vocab: int,
    ) -> torch.Tensor:
        """Best token of each row of hidden [N, H] times weight [V, H] -> int64 [N]; ``vocab`` > 0
        looks at the first so many tokens only."""

    def noised_argmax(
        self, logits: torch.Tensor, inverse_temperature: torch.Tensor, row_keys: torch.Tensor
    ) -> torch.Tensor:
        """Best token of each row of logits float32 [N, V] -> int64 [N]."""

    def noised_topk(
        self,
        logits: torch.Tensor,
        count: int,
        inverse_temperature: torch.Tensor,
        row_keys: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Best ``count`` of each row, best first: scores float32 [N, count], ids int64."""


class Backend(Protocol):
    """Operations of one decoder layer and of the head.

    Activations ``x`` are [T, width] in ``activation_dtype`` (float32 or bfloat16). A *weight* is
    whatever ``pack`` returned; the model code never looks inside. KV caches of one layer are
    [num_blocks, block_size, kv_heads, head_dim].
    """

    name: str
    device: torch.device
    activation_dtype: torch.dtype
    fallback: str
    """Why a faster backend, which was to be taken, is not; empty if none was."""

    @property
    def sampling(self) -> SamplingKernels | None:
        """Compiled sampling, if the device has any."""

    def pack(self, weight: torch.Tensor) -> object:
        """Bring a [out, in] matrix into the form ``linear`` wants (stored dtype is kept)."""

    def first_rows(self, weight: object, count: int) -> object:
        """A packed weight of the first ``count`` output rows, sharing memory."""

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

    def gated_linear(
        self, x: torch.Tensor, weight: object, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The product of x [T, in] with a packed [2I, in] matrix (and its bias), gate over up ->
        silu(gate) * up, [T, I]."""

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
