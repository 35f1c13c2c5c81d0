"""Help for tests that run the program: a byte-level model pair, a scratch /dev/shm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<s>", "</s>")
VOCAB_SIZE = len(SPECIAL) + 256
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2


def command(*arguments: str) -> list[str]:
    """Command line of ``ssd-pipe`` with this interpreter."""
    return [sys.executable, "-m", "ssd_pipe", *arguments]


def byte_model(folder: Path, name: str, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Path:
    """A tiny random Llama checkpoint whose tokens are three special ones and the 256 bytes.

    Written without torch or transformers, whose import costs more than these tests.
    """
    made = folder / name
    made.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (made / "config.json").write_text(json.dumps(config))
    save_file(_weights(vocab_size, seed), made / "model.safetensors", metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate([*SPECIAL, *alphabet])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def _weights(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * 0.2).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    weights = {"model.embed_tokens.weight": matrix(vocab_size, HIDDEN), "model.norm.weight": ones}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights[f"{layer}.input_layernorm.weight"] = ones
        weights[f"{layer}.post_attention_layernorm.weight"] = ones
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{layer}.self_attn.{part}_proj.weight"] = matrix(heads * HEAD_DIM, HIDDEN)
        weights[f"{layer}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        for part in ("gate", "up"):
            weights[f"{layer}.mlp.{part}_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
    return weights
