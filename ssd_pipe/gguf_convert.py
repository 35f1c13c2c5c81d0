"""Turn a Llama-architecture GGUF file into a plain model folder (safetensors and JSON).

Quantised blocks are expanded in float32 by the ``gguf`` package and rounded once to bfloat16.
GGUF stores the rows of q and k interleaved for its own rotary convention; they are put back into
the half-split order of the safetensors checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssd_pipe.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

Progress = Callable[[str, int, int], None]
"""(what is being done, done so far, total or 0 if unknown)"""

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_path: Path, folder: Path, progress: Progress) -> None:
    """Write model.safetensors (bf16), config.json, generation_config.json and the tokenizer.

    Raises ModelError if the file is not a Llama model this can convert.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_path)
    except ValueError as error:
        raise ModelError(f"{gguf_path.name}: not a GGUF file: {error}") from None
    config = _model_config(reader, gguf_path.name)
    weights = folder / "model.safetensors"
    _write_weights(reader, config, weights, progress)
    _write_json(folder / "config.json", config)
    shutil.copymode(folder / "config.json", weights)  # safetensors writes files only we can read
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    progress("writing the tokenizer", 0, 0)
    _write_tokenizer(gguf_path, str(_value(reader, "tokenizer.ggml.pre", "")), folder)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [heads * head_dim, in] from GGUF's interleaved to half-split rotary order."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def safetensors_name(gguf_name: str) -> str:
    """Name of a tensor in the Llama checkpoints of transformers. Raises ModelError if unknown."""
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and part in _LAYER_NAMES:
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    raise ModelError(f"GGUF tensor {gguf_name!r} is not part of a Llama model")


def _value(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.fields.get(key)
    if field is not None:
        return field.contents()
    if default is None:
        raise ModelError(f"GGUF metadata lacks {key!r}")
    return default


def _model_config(reader: GGUFReader, name: str) -> dict[str, Any]:
    if (architecture := _value(reader, "general.architecture")) != "llama":
        raise ModelError(f"{name}: GGUF architecture {architecture!r} is not supported, only llama")
    heads = int(_value(reader, "llama.attention.head_count"))
    hidden = int(_value(reader, "llama.embedding_length"))
    eos = int(_value(reader, "tokenizer.ggml.eos_token_id"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(_value(reader, "llama.vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": int(_value(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_value(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_value(reader, "llama.attention.head_count_kv", heads)),
        "head_dim": int(_value(reader, "llama.attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(_value(reader, "llama.context_length")),
        # stored as float32: 9.999999747378752e-06 was 1e-05
        "rms_norm_eps": float(f"{_value(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(_value(reader, "llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": int(_value(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": eos,
        "pad_token_id": int(_value(reader, "tokenizer.ggml.padding_token_id", eos)),
        "torch_dtype": "bfloat16",
    }


def _write_weights(
    reader: GGUFReader, config: dict[str, Any], path: Path, progress: Progress
) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    permuted_heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    tensors: dict[str, torch.Tensor] = {}
    total = len(reader.tensors)
    for done, tensor in enumerate(reader.tensors):
        progress("expanding weights", done, total)
        name = safetensors_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in permuted_heads:
            weight = unpermute(weight, permuted_heads[part])
        dense = np.array(weight, dtype=np.float32, order="C")
        tensors[name] = torch.from_numpy(dense).to(torch.bfloat16)
    progress("expanding weights", total, total)
    save_file(tensors, path, metadata={"format": "pt"})


def _write_tokenizer(gguf_path: Path, pre: str, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    if pre == "smollm":
        # transformers gives every "gpt2" vocabulary the plain byte-level splitter; this one was
        # trained with every digit a word of its own, which matters after a run of spaces.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.save_pretrained(folder)
    template = folder / "chat_template.jinja"
    settings_path = folder / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text())
    for key in ("backend", "is_local", "local_files_only", "name_or_path"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["clean_up_tokenization_spaces"] = False
    if template.is_file():
        settings["chat_template"] = template.read_text()
    _write_json(settings_path, settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
