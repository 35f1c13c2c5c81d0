"""Tiny random checkpoints, written by transformers, and their own logits."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

Family = Literal["llama", "qwen3"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_tiny(
    tmp_path: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    name: str = "",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint to ``tmp_path/name`` and return that folder.

    ``overrides`` are transformers' config fields (``vocab_size=17``). The weights are large enough
    that the next token depends on the whole context; norms and biases are random too.
    """
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    } | overrides
    import transformers as hf  # seconds: not for processes that only want the helpers below

    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
    }
    config_class, model_class = kinds[family]
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**settings))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif key.endswith(".bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
    folder = tmp_path / (name or f"tiny-{family}")
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def reference_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' float32 logits of every position, [len(tokens), V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0]


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def perturbed(model: Path, folder: Path, noise: float, seed: int = 7) -> Path:
    """A copy of a checkpoint whose matrices carry noise of that share of their spread.

    Stands for a draft that agrees with its target often but not always.
    """
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: w + noise * w.std() * torch.randn(w.shape, generator=generator) if w.dim() == 2 else w
        for name, w in load_file(model / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
