"""The layer operations on compiled CPU kernels: float32 arithmetic, bf16 or float32 weights.

Every result is bitwise independent of the other rows of the batch, of the number of threads, and
of whether a token's keys lie in its trunk or its suffix.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from ipc.errors import ModelError
from models.batch import ForwardBatch
from models.native.forward import FusedForward, check_cache, view_of
from models.native.library import CHeads, CRotary, dense, library, pointer, rows_of
from models.native.sampling import NativeSampling
from models.native.weights import Arena, PackedWeight

if TYPE_CHECKING:
    from models.layers import DecoderLayer

_HANDS_WORK_OUT = 1 << 13  # elements below which one thread finishes before two have met


class NativeBackend:
    """Backend protocol on a CPU with float32 activations and KV.

    Threads are torch's (``torch.set_num_threads``), taken at each call. Raises NativeUnavailable
    if the kernels cannot be compiled here.
    """

    name = "native"
    activation_dtype = torch.float32
    fallback = ""
    sampling = NativeSampling()

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._lib = library()
        self._arena = Arena()

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Pack [out, in] bf16 or float32 (others become float32); ``weight`` can go afterwards."""
        if weight.ndim != 2 or not weight.numel():
            raise ModelError(f"a weight to pack must be [out, in], got {tuple(weight.shape)}")
        if weight.dtype not in (torch.bfloat16, torch.float32):
            weight = weight.float()
        return PackedWeight(weight.detach(), self._arena)

    def first_rows(self, weight: object, count: int) -> PackedWeight:
        return cast(PackedWeight, weight).first(count)

    def linear(self, x: torch.Tensor, weight: object, bias: torch.Tensor | None) -> torch.Tensor:
        w = cast(PackedWeight, weight)
        x = rows_of(x)
        if x.shape[1] != w.k:
            raise ModelError(f"linear: x has {x.shape[1]} columns, the weight takes {w.k}")
        m = x.shape[0]
        bias = None if bias is None else dense(bias, torch.float32)
        y = torch.empty((m, w.n))
        self._lib.ssd_linear(
            w.address,
            x.data_ptr(),
            x.stride(0),
            m,
            pointer(bias),
            None,
            0,
            y.data_ptr(),
            w.n,
            torch.get_num_threads(),
        )
        return y

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Ids out of range give zeros."""
        if table.dtype not in (torch.bfloat16, torch.float32):
            table = table.float()
        table, tokens = table.contiguous(), dense(tokens, torch.int64)
        vocab, width = table.shape
        y = torch.empty((tokens.shape[0], width))
        self._lib.ssd_embed(
            table.data_ptr(),
            table.dtype == torch.bfloat16,
            vocab,
            width,
            tokens.data_ptr(),
            tokens.shape[0],
            y.data_ptr(),
        )
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        shape = x.shape
        if x.ndim != 2:
            x = x.reshape(-1, shape[-1])
        x, weight = rows_of(x), dense(weight, torch.float32)
        m, n = x.shape
        y = torch.empty((m, n))
        self._lib.ssd_rms_norm(
            x.data_ptr(), x.stride(0), m, n, weight.data_ptr(), eps, y.data_ptr(), _threads(m * n)
        )
        return y if len(shape) == 2 else y.view(shape)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight = rows_of(x), rows_of(residual), dense(weight, torch.float32)
        m, n = x.shape
        y, total = torch.empty((m, n)), torch.empty((m, n))
        self._lib.ssd_add_rms_norm(
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            m,
            n,
            weight.data_ptr(),
            eps,
            y.data_ptr(),
            total.data_ptr(),
            _threads(m * n),
        )
        return y, total

    def gated_linear(
        self, x: torch.Tensor, weight: object, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self.silu_mul(self.linear(x, weight, bias))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2I] -> silu(first half) * second half, [T, I]."""
        gate_up = rows_of(gate_up)
        m, n = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty((m, n))
        self._lib.ssd_silu_mul(
            gate_up.data_ptr(), gate_up.stride(0), m, n, y.data_ptr(), _threads(m * n * 4)
        )
        return y

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
        qkv, cos, sin = rows_of(qkv), dense(cos, torch.float32), dense(sin, torch.float32)
        q_norm = None if q_norm is None else dense(q_norm, torch.float32)
        k_norm = None if k_norm is None else dense(k_norm, torch.float32)
        positions, slots = dense(batch.positions, torch.int64), dense(batch.slots, torch.int64)
        check_cache(k_cache, v_cache)
        m = qkv.shape[0]
        shape = CHeads(heads, kv_heads, head_dim)
        rotary = CRotary(cos.data_ptr(), sin.data_ptr(), pointer(q_norm), pointer(k_norm), eps)
        q = torch.empty((m, heads, head_dim))
        self._lib.ssd_rope_and_store(
            qkv.data_ptr(),
            qkv.stride(0),
            m,
            ctypes.addressof(shape),
            ctypes.addressof(rotary),
            positions.data_ptr(),
            slots.data_ptr(),
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            _threads(qkv.numel()),
        )
        return q

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
    ) -> torch.Tensor:
        check_cache(k_cache, v_cache)
        q = dense(q, torch.float32)
        m, heads, head_dim = q.shape
        view = view_of(batch, k_cache.shape[1])
        shape = CHeads(heads, k_cache.shape[2], head_dim)
        out = torch.empty((m, heads * head_dim))
        self._lib.ssd_attention(
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            ctypes.addressof(shape),
            view.address,
            scale,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def fuse(self, layers: Sequence[DecoderLayer], norm: torch.Tensor, eps: float) -> FusedForward:
        """All layers and the final ``norm`` [H] of an unsharded decoder as one callable,
        ``fused(x, batch, kv) -> hidden``: bitwise the same, without a Python call per operation."""
        return FusedForward(layers, norm, eps)


def _threads(elements: int) -> int:
    return 1 if elements < _HANDS_WORK_OUT else torch.get_num_threads()
