"""The layer operations on an NVIDIA GPU: cuBLAS for the products of many tokens, Triton kernels for
the rest.

No operation waits for the host, so a whole forward pass can be captured in a CUDA graph. What a
token gets depends neither on its batch mates nor on their number, up to ``CudaOptions.few_tokens``
of them: norms, rotation, split attention (its splits lie at fixed positions) and our products keep
the order of their sums. Beyond, cuBLAS picks another kernel for another number of rows, and passes
of more than ``CudaOptions.split_tokens`` tokens run attention unsplit. The fused products of single
tokens (``fused_width``) have an order of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

from ipc.errors import ConfigError
from models.backends.base import AttentionKind
from models.batch import ForwardBatch
from models.cuda.attention import paged_attention
from models.cuda.flashinfer import FlashInferAttention
from models.cuda.norms import add_rms_norm, rms_norm, silu_mul
from models.cuda.products import MAX_ROWS, few_rows_linear
from models.cuda.rotary import rope_and_store
from models.cuda.sampling import CudaSampling
from models.cuda.tiles import StaticBatch, Tiles, tile_width, tiles_of
from models.kv_cache import KVCache

if TYPE_CHECKING:
    from models.layers import DecoderLayer

FusedForward = Callable[[torch.Tensor, ForwardBatch, KVCache], torch.Tensor]


NARROW = 1024


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """What runs where; the defaults are for an H200.

    Attributes:
        split: positions of an attention split.
        split_tokens: most tokens of a pass whose attention is split.
        few_tokens: most tokens of a pass that takes our products, 0 = none. They start on a matrix
            while the kernel before still runs, which cuBLAS' do not, and give a token the same
            result whatever their number.
        fused_width: widest hidden size whose passes of one token take the products that norm and
            gate in the same kernel, 0 = none. On an H200 they win up to ``NARROW``
            (SmolLM2-135M: 0.53 ms against 0.65 ms), at the price of another order of sums.
    """

    split: int = 128
    split_tokens: int = 256
    few_tokens: int = 32
    fused_width: int = 0

    def __post_init__(self) -> None:
        if self.split < 16 or self.split % 16:
            raise ConfigError("split", f"must be a positive multiple of 16, got {self.split}")
        if not 0 <= self.few_tokens <= MAX_ROWS:
            raise ConfigError("few_tokens", f"must be 0..{MAX_ROWS}, got {self.few_tokens}")


class CudaBackend:
    """Backend protocol on a CUDA device, in bfloat16 or float32; weights stay [out, in].

    ``attention``: "flashinfer" for pieces of prompts, "triton" (our kernel) for everything; "auto"
    is "triton". Raises ConfigError if FlashInfer cannot be had.
    """

    name = "cuda"
    fallback = ""

    def __init__(
        self,
        device: torch.device | str = "cuda",
        activation_dtype: torch.dtype = torch.bfloat16,
        options: CudaOptions | None = None,
        attention: AttentionKind = "auto",
    ) -> None:
        self.device = torch.device(device)
        self.activation_dtype = activation_dtype
        self.options = options or CudaOptions()
        self.sampling = CudaSampling(self.linear)
        self._flash = None
        if attention == "flashinfer":
            self._flash = FlashInferAttention(self.device, activation_dtype)

    def pack(self, weight: torch.Tensor) -> object:
        return weight.to(self.device, self.activation_dtype).contiguous()

    def first_rows(self, weight: object, count: int) -> object:
        return cast(torch.Tensor, weight)[:count]

    def linear(
        self,
        x: torch.Tensor,
        weight: object,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the protocol says; ``out``: where to put the product."""
        w = cast(torch.Tensor, weight)
        if self._few(x):
            return few_rows_linear(x, w, bias, out=out)
        if out is None:
            return functional.linear(x, w, bias)
        if bias is None:
            return torch.mm(x, w.t(), out=out)
        return torch.addmm(bias, x, w.t(), out=out)

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, table).to(self.activation_dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def gated_linear(
        self, x: torch.Tensor, weight: object, bias: torch.Tensor | None
    ) -> torch.Tensor:
        w = cast(torch.Tensor, weight)
        if bias is None and self._few(x):
            return few_rows_linear(x, w, gated=True)
        return silu_mul(self.linear(x, w, bias))

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
        """As the protocol says; a token with a negative slot is padding and writes nothing."""
        return rope_and_store(
            qkv,
            heads,
            kv_heads,
            head_dim,
            cos,
            sin,
            q_norm,
            k_norm,
            eps,
            batch,
            k_cache,
            v_cache,
        )

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
    ) -> torch.Tensor:
        """As the protocol says; a token that sees nothing gets zeros."""
        if self._flash is not None and self._flash.takes(batch):
            return self._flash(q, k_cache, v_cache, batch, scale)
        tiles = self._tiles(batch, q.shape[1], k_cache.shape[2])
        split = self.options.split if q.shape[0] <= self.options.split_tokens else 0
        return paged_attention(q, k_cache, v_cache, batch, tiles, scale, split)

    def fuse(self, layers: Sequence[DecoderLayer], norm: torch.Tensor, eps: float) -> FusedForward:
        """All layers and the final ``norm`` of an unsharded decoder: ``fused(x, batch, kv)``.

        Single tokens take fused products in a narrow model, all else the plain ones.
        """
        from models.cuda.layers import CudaForward

        return CudaForward(self, layers, norm, eps)

    def _few(self, x: torch.Tensor) -> bool:
        return 0 < x.shape[0] <= self.options.few_tokens

    def takes_fused(self, tokens: int, width: int) -> bool:
        """Whether a pass of ``tokens`` through a model of hidden size ``width`` runs fused."""
        return tokens == 1 and width <= self.options.fused_width

    def _tiles(self, batch: ForwardBatch, heads: int, kv_heads: int) -> Tiles:
        if isinstance(batch, StaticBatch) and batch.tiles is not None:
            return batch.tiles
        if not isinstance(batch.plan, Tiles):
            rows = batch.block_tables.shape[0]
            width = tile_width(
                -(-batch.seqs.shape[0] // rows), heads, kv_heads, self.activation_dtype
            )
            batch.plan = tiles_of(batch.seqs, rows, width)
        return batch.plan
