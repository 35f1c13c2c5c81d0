"""Builds a Transformer, or one rank's shard of it, from a weight source."""

from __future__ import annotations

import torch
from torch.nn import functional

from ipc.errors import ModelError
from models.backends.base import Backend
from models.checkpoint import SafetensorsSource, WeightSource
from models.config import ModelConfig
from models.layers import MLP, Attention, DecoderLayer, Embedding, Linear
from models.parallel import TensorParallel
from models.rotary import rotary_tables
from models.sharding import Shard, Span, plan_shard
from models.transformer import Transformer

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
POSITION_SLACK = 128
"""Rotary positions beyond the last usable one: chains and branches run ahead of a text's end."""
HARMLESS_SUFFIX = ".rotary_emb.inv_freq"


def build_transformer(
    config: ModelConfig,
    source: WeightSource,
    backend: Backend,
    tp: TensorParallel,
    max_positions: int = 0,
) -> Transformer:
    """Read every weight once and pack it. ``max_positions`` 0 = the model's own limit.

    Raises ModelError for a missing, misshapen or unexpected weight, naming it and the file.
    """
    shard = plan_shard(config, tp.rank, tp.size)
    positions = max_positions or config.max_positions
    build = _Build(config, shard, source, backend, tp)
    rows = positions + POSITION_SLACK
    rotary = rotary_tables(config.rope, config.head_dim, rows, backend.device)
    layers = [build.layer(i, rotary) for i in range(config.num_layers)]
    table = build.vocabulary(EMBEDDING)
    head = table if config.tie_word_embeddings else build.vocabulary(HEAD)
    model = Transformer(
        config,
        shard,
        backend,
        tp,
        embedding=Embedding(backend, tp, table, shard.vocab.start, len(shard.vocab)),
        layers=layers,
        norm=build.norm(FINAL_NORM, config.hidden_size),
        head=build.packed(head, None),
        max_positions=positions,
        weight_bytes=build.weight_bytes,
    )
    if isinstance(source, SafetensorsSource):
        _refuse_unexpected(source, build.seen, config.tie_word_embeddings)
    return model


class _Build:
    """Reads the parts of one shard; remembers the names it has seen."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        source: WeightSource,
        backend: Backend,
        tp: TensorParallel,
    ) -> None:
        self.config = config
        self.shard = shard
        self.source = source
        self.backend = backend
        self.tp = tp
        self.seen: set[str] = set()
        self.weight_bytes = 0

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> torch.Tensor:
        self.seen.add(name)
        tensor = self.source.read(name, shape, rows, columns)
        # Backends store float32 and bfloat16; float16 does not fit bfloat16 without loss.
        tensor = tensor.float() if tensor.dtype == torch.float16 else tensor
        return tensor.to(self.backend.device)

    def norm(self, name: str, width: int) -> torch.Tensor:
        return self.read(name, (width,)).float()

    def packed(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        self.weight_bytes += weight.nbytes
        return Linear(self.backend, weight, bias)

    def columns(self, parts: list[tuple[str, int, Span]], bias: bool) -> Linear:
        """Column-parallel, fused: of each (name, full rows, rows of this rank), one on another."""
        width = self.config.hidden_size
        weight = [self.read(f"{n}.weight", (full, width), rows) for n, full, rows in parts]
        biases = [self.read(f"{n}.bias", (full,), rows) for n, full, rows in parts if bias]
        return self.packed(torch.cat(weight), torch.cat(biases) if bias else None)

    def rows(self, name: str, full: int, columns: Span, bias: bool) -> Linear:
        """Row-parallel: the sum over ranks is the product, so only rank 0 adds the bias."""
        height = self.config.hidden_size
        whole = columns if self.tp.size > 1 else None
        weight = self.read(f"{name}.weight", (height, full), None, whole)
        added = self.read(f"{name}.bias", (height,)) if bias else None
        return self.packed(weight.contiguous(), added if self.tp.rank == 0 else None)

    def vocabulary(self, name: str) -> torch.Tensor:
        """This rank's rows of an embedding or head, padded with zero rows to the common count."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        table = self.read(name, shape, self.shard.vocab)
        missing = self.shard.vocab_rows - table.shape[0]
        return functional.pad(table, (0, 0, 0, missing)) if missing else table

    def layer(self, index: int, rotary: tuple[torch.Tensor, torch.Tensor]) -> DecoderLayer:
        config, shard, dim = self.config, self.shard, self.config.head_dim
        at, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
        heads, kv_heads, width = shard.heads, shard.kv_heads, config.intermediate_size
        attention = Attention(
            self.backend,
            self.tp,
            qkv=self.columns(
                [
                    (f"{at}.q_proj", q_rows, heads.times(dim)),
                    (f"{at}.k_proj", kv_rows, kv_heads.times(dim)),
                    (f"{at}.v_proj", kv_rows, kv_heads.times(dim)),
                ],
                config.attention_bias,
            ),
            o=self.rows(f"{at}.o_proj", q_rows, heads.times(dim), config.attention_bias),
            q_norm=self.norm(f"{at}.q_norm.weight", dim) if config.qk_norm else None,
            k_norm=self.norm(f"{at}.k_norm.weight", dim) if config.qk_norm else None,
            heads=len(heads),
            kv_heads=len(kv_heads),
            head_dim=dim,
            rotary=rotary,
            eps=config.rms_norm_eps,
        )
        gate_up = self.columns(
            [
                (f"{mlp}.gate_proj", width, shard.intermediate),
                (f"{mlp}.up_proj", width, shard.intermediate),
            ],
            config.mlp_bias,
        )
        down = self.rows(f"{mlp}.down_proj", width, shard.intermediate, config.mlp_bias)
        name = f"model.layers.{index}"
        return DecoderLayer(
            attention,
            MLP(self.backend, self.tp, gate_up=gate_up, down=down),
            self.norm(f"{name}.input_layernorm.weight", config.hidden_size),
            self.norm(f"{name}.post_attention_layernorm.weight", config.hidden_size),
        )


def _refuse_unexpected(source: SafetensorsSource, seen: set[str], tied: bool) -> None:
    for name in source.names:
        harmless = name.endswith(HARMLESS_SUFFIX) or (tied and name == HEAD)
        if name not in seen and not harmless:
            raise ModelError(f"weight {name} in {source.path_of(name)} is not part of this model")
