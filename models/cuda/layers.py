"""The decoder's layers on one GPU; a narrow model's single tokens take fused products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from models.batch import ForwardBatch
from models.cuda.one_row import one_row_linear
from models.kv_cache import KVCache

if TYPE_CHECKING:
    from models.backends.cuda import CudaBackend
    from models.layers import DecoderLayer, Linear


class CudaForward:
    """Everything after the embedding: x [T, H], batch, KV -> normed hidden states [L, H]."""

    def __init__(
        self,
        backend: CudaBackend,
        layers: Sequence[DecoderLayer],
        norm: torch.Tensor,
        eps: float,
    ) -> None:
        self._backend = backend
        self._layers = layers
        self._norm = norm
        self._eps = eps
        self._width = norm.shape[0]
        # Gated products take no bias; no model at hand has one there.
        self._fusable = all(layer.mlp.gate_up.bias is None for layer in layers)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        if self._fusable and self._backend.takes_fused(x.shape[0], self._width):
            return self._fused(x, batch, kv)
        return self._plain(x, batch, kv)

    def _plain(self, residual: torch.Tensor, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        backend, eps, wanted = self._backend, self._eps, batch.logit_index
        x = backend.rms_norm(residual, self._layers[0].input_norm, eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            keys, values = kv.keys[index], kv.values[index]
            q = layer.attention.store(x, batch, keys, values)
            if index == last and wanted.shape[0] == 0:
                return residual[:0]
            attended = layer.attention.attend(q, batch, keys, values)
            if index == last and wanted.shape[0] < attended.shape[0]:
                attended, residual = attended[wanted], residual[wanted]
            projected = layer.attention.project(attended)
            x, residual = backend.add_rms_norm(projected, residual, layer.post_norm, eps)
            following = self._norm if index == last else self._layers[index + 1].input_norm
            x, residual = backend.add_rms_norm(layer.mlp(x), residual, following, eps)
        return x

    def _fused(self, residual: torch.Tensor, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        eps, wanted = self._eps, batch.logit_index
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attention, keys, values = layer.attention, kv.keys[index], kv.values[index]
            qkv = _product(residual, attention.qkv, norm=layer.input_norm, eps=eps)
            q = self._backend.rope_and_store(
                qkv,
                attention.heads,
                attention.kv_heads,
                attention.head_dim,
                attention.cos,
                attention.sin,
                attention.q_norm,
                attention.k_norm,
                attention.eps,
                batch,
                keys,
                values,
            )
            if index == last and wanted.shape[0] == 0:
                return residual[:0]
            attended = attention.attend(q, batch, keys, values)
            if index == last and wanted.shape[0] < attended.shape[0]:
                attended, residual = attended[wanted], residual[wanted]
            residual = _product(attended, attention.o, residual=residual)
            gate_up = layer.mlp.gate_up
            x = _product(residual, gate_up, norm=layer.post_norm, eps=eps, gated=True)
            residual = _product(x, layer.mlp.down, residual=residual)
        return self._backend.rms_norm(residual, self._norm, eps)


def _product(
    x: torch.Tensor,
    linear: Linear,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    weight = cast(torch.Tensor, linear.weight)
    return one_row_linear(
        x, weight, linear.bias, norm=norm, eps=eps, gated=gated, residual=residual
    )
