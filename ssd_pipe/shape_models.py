"""Model folders of published shapes without weights, for timing with random ones.

``shape:llama-3.1-8b`` names such a folder: a config, and a tokenizer that knows single bytes only,
so that everything but the loader sees an ordinary model. Clients send token ids.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from models.config import CONFIG_FILE, ModelConfig
from models.published import shape
from ssd_pipe.errors import ConfigError, ModelError

PREFIX = "shape:"


def is_shape(name: str) -> bool:
    """Whether a model name means a shape without weights."""
    return name.startswith(PREFIX)


def shape_folder(name: str, parent: Path) -> Path:
    """The folder of shape ``name`` (with its prefix) in ``parent``, made if it is not there.

    Raises ModelError for an unknown shape or a folder that cannot be written.
    """
    short = name.removeprefix(PREFIX)
    try:
        config = shape(short)
    except ConfigError as error:
        raise ModelError(f"model {name!r}: {error}") from None
    folder = parent / short
    if (folder / "tokenizer.json").is_file():
        return folder
    fresh = ""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        fresh = tempfile.mkdtemp(dir=parent, prefix=f".{short}-")
        (Path(fresh) / CONFIG_FILE).write_text(json.dumps(hub_config(config), indent=1) + "\n")
        _write_tokenizer(Path(fresh) / "tokenizer.json")
        Path(fresh).chmod(0o755)
        os.rename(fresh, folder)
    except OSError as error:
        if not (folder / "tokenizer.json").is_file():  # else another process was first
            raise ModelError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True) if fresh else None
    return folder


def hub_config(config: ModelConfig) -> dict[str, Any]:
    """``config`` as a ``config.json`` has it; ``ModelConfig.from_folder`` reads it back."""
    rope: dict[str, Any] = {"rope_theta": config.rope.theta, "rope_type": config.rope.kind}
    if config.rope.kind == "llama3":
        rope |= {
            "factor": config.rope.factor,
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_positions,
        }
    return {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "dtype": config.dtype,
    }


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
