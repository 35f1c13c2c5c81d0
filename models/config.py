"""Shape and constants of a model, read from its folder's ``config.json``; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from ipc.errors import ModelError
from models.folder import read_object

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
QK_NORM = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}
"""Supported architectures, and whether they norm q and k per head."""

RopeKind = Literal["default", "llama3"]
StoredDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. The last four fields matter only to kind "llama3"."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder needs to know; ``from_folder`` reads and checks it.

    Attributes:
        qk_norm: q and k are normed per head before rotation (Qwen3).
        attention_bias: q, k, v and o projections have a bias.
        mlp_bias: gate, up and down projections have a bias.
        eos_ids: ids that end a text, of config.json and generation_config.json together.
        dtype: the checkpoint's stored type.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: StoredDtype = "float32"

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read ``config.json`` (and ``generation_config.json`` if there is one).

        Raises ModelError naming the file and the field that is missing, wrong or not supported.
        """
        path = Path(folder) / CONFIG_FILE
        fields = _Fields(read_object(path), path)
        names = fields.data.get("architectures") or []
        architecture = str(names[0]) if isinstance(names, list) and names else "none named"
        if architecture not in QK_NORM:
            known = ", ".join(QK_NORM)
            fields.fail("architectures", f"{architecture} is not supported (supported: {known})")
        _refuse_unsupported(fields)
        qwen = architecture == "Qwen3ForCausalLM"
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        head_dim = fields.integer("head_dim", 128 if qwen else hidden // heads)
        kv_heads = fields.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            fields.fail("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
        if head_dim % 2:
            fields.fail("head_dim", f"must be even, got {head_dim}")
        max_positions = fields.integer("max_position_embeddings")
        eos = fields.ids("eos_token_id")
        generation = Path(folder) / GENERATION_FILE
        if generation.is_file():
            eos += _Fields(read_object(generation), generation).ids("eos_token_id")
        bos = fields.ids("bos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_positions=max_positions,
            rope=_rope(fields, max_positions),
            qk_norm=QK_NORM[architecture],
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias") and not qwen,
            bos_id=bos[0] if bos else None,
            eos_ids=tuple(dict.fromkeys(eos)),
            dtype=_dtype(fields),
        )


class _Fields:
    """Typed access to a JSON object; every complaint names the file and the field."""

    def __init__(self, data: dict[str, Any], path: Path) -> None:
        self.data = data
        self.path = path

    def fail(self, name: str, message: str) -> NoReturn:
        raise ModelError(f"{self.path}: {name}: {message}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.data.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail(name, f"must be a positive integer, got {value!r}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.data.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            self.fail(name, f"must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.data.get(name)
        if value is not None and not isinstance(value, bool):
            self.fail(name, f"must be true or false, got {value!r}")
        return bool(value)

    def ids(self, name: str) -> list[int]:
        """A token id, a list of them, or null."""
        value = self.data.get(name)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in items):
            self.fail(name, f"must be a token id or a list of them, got {value!r}")
        return list(items)


def _refuse_unsupported(fields: _Fields) -> None:
    data = fields.data
    if data.get("hidden_act", "silu") != "silu":
        fields.fail("hidden_act", f"only silu is supported, got {data['hidden_act']!r}")
    if data.get("quantization_config"):
        fields.fail("quantization_config", "quantised checkpoints are not supported")
    if data.get("use_sliding_window"):
        fields.fail("use_sliding_window", "sliding-window attention is not supported")
    for kind in data.get("layer_types") or []:
        if kind != "full_attention":
            fields.fail("layer_types", f"{kind} is not supported")


def _rope(fields: _Fields, max_positions: int) -> RopeConfig:
    """Rope settings: ``rope_parameters`` (transformers 5), or ``rope_theta`` + ``rope_scaling``."""
    name = "rope_parameters" if fields.data.get("rope_parameters") else "rope_scaling"
    section = fields.data.get(name) or {}
    if not isinstance(section, dict):
        fields.fail(name, f"must be an object, got {section!r}")
    rope = _Fields(section, fields.path)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = section.get("rope_type", section.get("type", "default"))
    for owner in (fields, rope):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            owner.fail("partial_rotary_factor", "only 1 is supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        fields.fail(name, f"rope type {kind!r} is not supported (supported: default, llama3)")
    return RopeConfig(
        theta,
        "llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.integer("original_max_position_embeddings", max_positions),
    )


def _dtype(fields: _Fields) -> StoredDtype:
    value = fields.data.get("dtype") or fields.data.get("torch_dtype") or "float32"
    match str(value).removeprefix("torch."):
        case "bfloat16":
            return "bfloat16"
        case "float16":
            return "float16"
        case "float32":
            return "float32"
    raise ModelError(f"{fields.path}: dtype: {value!r} is not supported")
