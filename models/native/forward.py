"""A whole forward pass in one call into the kernels, and the C view of a ForwardBatch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ipc.errors import ModelError
from models.batch import ForwardBatch
from models.native.library import CBatch, CHeads, CLayer, CModel, dense, library, pointer
from models.native.weights import PackedWeight

if TYPE_CHECKING:
    from models.kv_cache import KVCache
    from models.layers import DecoderLayer, Linear


class BatchView:
    """The C struct of a ForwardBatch, with the tensors it points into.

    Attributes:
        address: of the struct; valid while this object lives.
    """

    __slots__ = ("_held", "_struct", "address", "block_size")

    def __init__(self, batch: ForwardBatch, block_size: int) -> None:
        long, short = torch.int64, torch.int32
        positions, slots = dense(batch.positions, long), dense(batch.slots, long)
        seqs, tables = dense(batch.seqs, short), dense(batch.block_tables, short)
        context = dense(batch.context_lens, short)
        suffix = lens = None
        width = 0
        if batch.suffix_slots is not None and batch.suffix_lens is not None:
            suffix, lens = dense(batch.suffix_slots, long), dense(batch.suffix_lens, short)
            width = suffix.shape[1]
        self._held = (positions, slots, seqs, tables, context, suffix, lens)
        self._struct = CBatch(
            positions.shape[0],
            positions.data_ptr(),
            slots.data_ptr(),
            seqs.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            context.data_ptr(),
            pointer(suffix),
            pointer(lens),
            width,
            block_size,
        )
        self.block_size = block_size
        self.address = ctypes.addressof(self._struct)


def view_of(batch: ForwardBatch, block_size: int) -> BatchView:
    """The batch's view, made once a forward (kept in ``batch.plan``)."""
    plan = batch.plan
    if not isinstance(plan, BatchView) or plan.block_size != block_size:
        plan = batch.plan = BatchView(batch, block_size)
    return plan


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raise ModelError unless the kernels can use this KV memory."""
    for cache in (k_cache, v_cache):
        if cache.dtype != torch.float32 or not cache.is_contiguous():
            raise ModelError("a KV cache of the native backend must be contiguous float32")


class FusedForward:
    """Every layer and the final norm of an unsharded decoder as one call.

    Bitwise the same as the backend's operations called one by one, for a tenth of the overhead.
    Not reentrant: one forward at a time.
    """

    def __init__(self, layers: Sequence[DecoderLayer], norm: torch.Tensor, eps: float) -> None:
        self._lib = library()
        self._held: list[object] = []
        self._array = (CLayer * len(layers))()
        for struct, layer in zip(self._array, layers, strict=True):
            self._describe(struct, layer)
        first = layers[0].attention
        self._hidden = self._packed(first.qkv).k
        self._model = CModel(
            ctypes.addressof(self._array),
            len(layers),
            self._hidden,
            self._packed(layers[0].mlp.down).k,
            CHeads(first.heads, first.kv_heads, first.head_dim),
            self._float(first.cos),
            self._float(first.sin),
            self._float(norm),
            eps,
            first.scale,
        )
        self._address = ctypes.addressof(self._model)
        self._scratch = torch.empty(0)
        self._kv: KVCache | None = None

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """Embedded tokens x [T, H] (overwritten) -> normed hidden states of ``batch.logit_index``,
        [L, H]; writes K and V of all T tokens to ``kv``."""
        if kv is not self._kv:
            self._use(kv)
        x, wanted = dense(x, torch.float32), dense(batch.logit_index, torch.int64)
        threads = torch.get_num_threads()
        tokens, count = x.shape[0], wanted.shape[0]
        out = torch.empty((count, self._hidden))
        if tokens == 0:
            return out
        size = self._lib.ssd_forward_scratch(self._address, tokens, threads)
        if size > self._scratch.numel():
            self._scratch = torch.empty(size)
        self._lib.ssd_forward(
            self._address,
            view_of(batch, kv.block_size).address,
            x.data_ptr(),
            wanted.data_ptr(),
            count,
            out.data_ptr(),
            self._scratch.data_ptr(),
            threads,
        )
        return out

    def _use(self, kv: KVCache) -> None:
        for struct, keys, values in zip(self._array, kv.keys, kv.values, strict=True):
            check_cache(keys, values)
            struct.k_cache, struct.v_cache = keys.data_ptr(), values.data_ptr()
        self._kv = kv

    def _describe(self, struct: CLayer, layer: DecoderLayer) -> None:
        attention, mlp = layer.attention, layer.mlp
        struct.input_norm = self._float(layer.input_norm)
        struct.post_norm = self._float(layer.post_norm)
        struct.q_norm = self._float(attention.q_norm)
        struct.k_norm = self._float(attention.k_norm)
        for name, linear in (
            ("qkv", attention.qkv),
            ("o", attention.o),
            ("gate_up", mlp.gate_up),
            ("down", mlp.down),
        ):
            setattr(struct, name, self._packed(linear).address)
            setattr(struct, f"{name}_bias", self._float(linear.bias))

    def _packed(self, linear: Linear) -> PackedWeight:
        if not isinstance(linear.weight, PackedWeight):
            raise ModelError("a fused forward needs weights packed by the native backend")
        self._held.append(linear.weight)
        return linear.weight

    def _float(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = dense(tensor, torch.float32)
        self._held.append(kept)
        return kept.data_ptr()
