"""The blocks of a decoder layer: fused projections held packed, called as plain methods."""

from __future__ import annotations

import torch

from models.backends.base import Backend
from models.batch import ForwardBatch
from models.parallel import TensorParallel


class Linear:
    """A packed [out, in] matrix and its bias ([out] in activation dtype, or None)."""

    __slots__ = ("backend", "bias", "weight")

    def __init__(self, backend: Backend, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.backend = backend
        self.weight = backend.pack(weight)
        self.bias = None if bias is None else bias.to(backend.device, backend.activation_dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return self.backend.linear(x, self.weight, self.bias)

    def first(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """The first ``count`` outputs, [T, in] -> [T, count]."""
        bias = None if self.bias is None else self.bias[:count]
        return self.backend.linear(x, self.backend.first_rows(self.weight, count), bias)


class Attention:
    """Grouped-query attention over the paged cache, on this rank's heads.

    ``q_norm`` and ``k_norm`` are float32 [head_dim] or None; ``qkv`` holds the rows of q, k and v,
    in this order. ``o`` is row-parallel: its bias must be on rank 0 only.
    """

    __slots__ = (
        "backend",
        "cos",
        "eps",
        "head_dim",
        "heads",
        "k_norm",
        "kv_heads",
        "o",
        "q_norm",
        "qkv",
        "scale",
        "sin",
        "tp",
    )

    def __init__(
        self,
        backend: Backend,
        tp: TensorParallel,
        *,
        qkv: Linear,
        o: Linear,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary: tuple[torch.Tensor, torch.Tensor],
        eps: float,
    ) -> None:
        self.backend = backend
        self.tp = tp
        self.qkv = qkv
        self.o = o
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.cos, self.sin = rotary
        self.eps = eps
        self.scale = head_dim**-0.5

    def store(
        self, x: torch.Tensor, batch: ForwardBatch, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Write K and V of x [T, H] to the cache; returns q [T, heads, head_dim]."""
        return self.backend.rope_and_store(
            self.qkv(x),
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.cos,
            self.sin,
            self.q_norm,
            self.k_norm,
            self.eps,
            batch,
            keys,
            values,
        )

    def attend(
        self, q: torch.Tensor, batch: ForwardBatch, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """-> [T, heads * head_dim]."""
        return self.backend.attention(q, keys, values, batch, self.scale)

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """[T, heads * head_dim] -> [T, H], summed over the ranks."""
        return self.tp.all_reduce(self.o(attended))


class MLP:
    """SwiGLU (arXiv 2002.05202): down(silu(gate x) * up x), gate and up in one matrix."""

    __slots__ = ("backend", "down", "gate_up", "tp")

    def __init__(
        self, backend: Backend, tp: TensorParallel, *, gate_up: Linear, down: Linear
    ) -> None:
        self.backend = backend
        self.tp = tp
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], summed over the ranks."""
        gate_up = self.gate_up
        gated = self.backend.gated_linear(x, gate_up.weight, gate_up.bias)
        return self.tp.all_reduce(self.down(gated))


class DecoderLayer:
    """One layer; the norm weights are float32 [H]. The transformer runs its parts in turn."""

    __slots__ = ("attention", "input_norm", "mlp", "post_norm")

    def __init__(
        self, attention: Attention, mlp: MLP, input_norm: torch.Tensor, post_norm: torch.Tensor
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.input_norm = input_norm
        self.post_norm = post_norm


class Embedding:
    """Token embedding split by vocabulary: a rank looks up its rows, the others' give zero."""

    __slots__ = ("backend", "rows", "start", "table", "tp")

    def __init__(
        self, backend: Backend, tp: TensorParallel, table: torch.Tensor, start: int, rows: int
    ) -> None:
        self.backend = backend
        self.tp = tp
        self.table = table
        self.start = start
        self.rows = rows

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]."""
        if self.tp.size == 1:
            return self.backend.embed(tokens, self.table)
        local = tokens - self.start
        outside = (local < 0) | (local >= self.rows)
        x = self.backend.embed(local.masked_fill(outside, 0), self.table)
        return self.tp.all_reduce(x.masked_fill(outside.unsqueeze(1), 0))
