"""The decoder of both model families (Llama and Qwen3), over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from models.backends.base import Backend
from models.batch import ForwardBatch
from models.config import ModelConfig
from models.kv_cache import KVCache, bytes_per_block
from models.layers import DecoderLayer, Embedding, Linear
from models.parallel import TensorParallel
from models.sharding import Shard

FusedForward = Callable[[torch.Tensor, ForwardBatch, KVCache], torch.Tensor]


class Transformer:
    """A pre-norm decoder, or one tensor-parallel rank of it. ``registry.load_model`` builds it.

    Attributes:
        config: the whole model's shape; ``shard`` is what this rank holds of it.
        max_positions: positions a text may use (the rotary tables reach a little further).
        weight_bytes: stored bytes of the matrices one forward and its logits read.
        embedding, layers, norm, head: the parts; a backend may run ``head`` in its own way.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        backend: Backend,
        tp: TensorParallel,
        *,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        head: Linear,
        max_positions: int,
        weight_bytes: int,
    ) -> None:
        self.config = config
        self.shard = shard
        self.backend = backend
        self.tp = tp
        self.max_positions = max_positions
        self.weight_bytes = weight_bytes
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        # A backend may offer ``fuse(layers, norm, eps)``: everything after the embedding as one
        # call (x, batch, kv) -> hidden. It cannot stop for the ranks' sums.
        fuse = getattr(backend, "fuse", None)
        self._fused: FusedForward | None = None
        if fuse is not None and tp.size == 1:
            self._fused = fuse(layers, norm, config.rms_norm_eps)

    def make_kv(self, num_blocks: int, block_size: int) -> KVCache:
        """A cache for this rank's KV heads, in the activation dtype."""
        return KVCache(
            self.config.num_layers,
            num_blocks,
            block_size,
            len(self.shard.kv_heads),
            self.config.head_dim,
            self.backend.activation_dtype,
            self.backend.device,
        )

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes a block of ``make_kv`` takes on this rank."""
        return bytes_per_block(
            self.config.num_layers,
            block_size,
            len(self.shard.kv_heads),
            self.config.head_dim,
            self.backend.activation_dtype,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """Write K and V of the batch's T tokens to ``kv``; returns the normed hidden states of
        ``batch.logit_index``, [L, H] in activation dtype, the same on every rank.

        All ranks must call it with equal batches. The last layer computes nothing for tokens
        without logits once their K and V are stored. Raises PeerLost.
        """
        add_norm, eps = self.backend.add_rms_norm, self.config.rms_norm_eps
        batch.plan = None
        wanted = batch.logit_index
        residual = self.embedding(batch.tokens)
        if self._fused is not None:
            return self._fused(residual, batch, kv)
        x = self.backend.rms_norm(residual, self.layers[0].input_norm, eps)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            keys, values, attention = kv.keys[index], kv.values[index], layer.attention
            q = attention.store(x, batch, keys, values)
            if index == last and wanted.shape[0] == 0:
                return residual[:0]
            attended = attention.attend(q, batch, keys, values)
            if index == last and wanted.shape[0] < attended.shape[0]:
                attended, residual = attended[wanted], residual[wanted]
            x, residual = add_norm(attention.project(attended), residual, layer.post_norm, eps)
            following = self.norm if index == last else self.layers[index + 1].input_norm
            x, residual = add_norm(layer.mlp(x), residual, following, eps)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, vocab: int = 0) -> torch.Tensor | None:
        """[L, H] from ``forward`` -> float32 [L, V] on rank 0, None on the others.

        ``vocab`` > 0 gives the columns of the first so many tokens only; not with
        tensor parallelism. With L = 0 every rank returns without a collective (rank 0 an empty
        tensor).
        """
        width = vocab or self.config.vocab_size
        if hidden.shape[0] == 0:
            return None if self.tp.rank else hidden.new_empty((0, width)).float()
        if vocab and self.tp.size == 1:
            return self.head.first(hidden, vocab).float()
        return self.tp.gather_logits(self.head(hidden).float(), self.config.vocab_size)

    @torch.inference_mode()
    def head_argmax(
        self,
        hidden: torch.Tensor,
        inverse_temperature: torch.Tensor,
        row_keys: torch.Tensor,
        vocab: int = 0,
    ) -> torch.Tensor:
        """Best noised token of each row of hidden [L, H] -> int64 [L], no logits stored.

        Only where ``backend.sampling`` is there, and without tensor parallelism; see
        ``SamplingKernels.head_argmax``.
        """
        kernels = self.backend.sampling
        if kernels is None or self.head.bias is not None or self.tp.size > 1:
            raise RuntimeError("this model has no fused head")
        return kernels.head_argmax(hidden, self.head.weight, inverse_temperature, row_keys, vocab)
