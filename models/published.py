"""Published shapes, by name, to time models whose weights are not at hand; imports no torch."""

from __future__ import annotations

from ipc.errors import ConfigError
from models.config import ModelConfig, RopeConfig


def _llama(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    rope: RopeConfig,
    vocab: int = 128256,
    max_positions: int = 131072,
    tied: bool = False,
) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_positions=max_positions,
        rope=rope,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )


def _qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_positions=40960,
        rope=RopeConfig(theta=1e6),
        qk_norm=True,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )


_LLAMA31 = RopeConfig(500000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
_LLAMA32 = RopeConfig(500000.0, "llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
_SMOL = RopeConfig(theta=100000.0)

SHAPES: dict[str, ModelConfig] = {
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128, rope=_LLAMA31),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128, rope=_LLAMA31),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 64, rope=_LLAMA32, tied=True),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "smollm2-135m": _llama(
        576, 1536, 30, 9, 3, 64, rope=_SMOL, vocab=49152, max_positions=8192, tied=True
    ),
    "smollm2-draft-16m": _llama(
        256, 896, 4, 4, 2, 64, rope=_SMOL, vocab=49152, max_positions=8192, tied=True
    ),
}
"""By name; the numbers are those of the models' own ``config.json``."""

SHAPES["llama-3.1-1b"] = SHAPES["llama-3.2-1b"]  # as the paper calls it
SHAPES["tiny"] = _llama(64, 128, 2, 4, 2, 16, rope=_SMOL, vocab=512, max_positions=2048, tied=True)
SHAPES["tiny-draft"] = _llama(
    32, 64, 1, 2, 1, 16, rope=_SMOL, vocab=512, max_positions=2048, tied=True
)  # nobody's: a pair to try programs with on any machine


def shape(name: str) -> ModelConfig:
    """The shape called ``name``. Raises ConfigError, listing what there is."""
    if name not in SHAPES:
        raise ConfigError("model", f"no shape {name!r}; there are {', '.join(sorted(SHAPES))}")
    return SHAPES[name]
