"""Configs and checkpoints: what is read, and what is said about what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.backends import make_backend
from models.checkpoint import RandomSource
from models.config import ModelConfig, RopeConfig
from models.parallel import TensorParallel
from models.registry import load_model
from models.rotary import inverse_frequencies
from models.sequence_batch import build_batch
from models.sharding import Span
from models.transformer import Transformer
from ssd_pipe.config import MAX_K
from ssd_pipe.errors import ConfigError, ModelError
from tests.models.tiny import LLAMA3_ROPE, make_tiny, random_tokens, reference_logits

TOKENS = random_tokens(12, 97)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def logits(model: Transformer) -> torch.Tensor:
    batch = build_batch([([1, 0, 2], 0, TOKENS, 0)], 4)
    found = model.logits(model.forward(batch, model.make_kv(3, 4)))
    assert found is not None
    return found


def load(folder: Path, **settings: Any) -> Transformer:
    return load_model(folder, backend="reference", **settings)


def test_index_of_several_files(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(
        logits(load(folder)), reference_logits(folder, TOKENS), atol=1e-4, rtol=1e-4
    )


def test_float16_checkpoint_is_widened(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, dtype=torch.float16)
    model = load(folder)
    expected = reference_logits(folder, TOKENS)
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


def test_missing_weight_is_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    edit_weights(folder, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"weight model\.layers\.1\.mlp\.up_proj\.weight is miss"):
        load(folder)


def test_misshapen_weight_is_named_with_its_file(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_weights(folder, lambda w: w.update({name: torch.zeros(16, 64)}))
    with pytest.raises(ModelError, match=r"k_proj\.weight in .*model\.safetensors has shape \(16"):
        load(folder)


def test_unexpected_weight_is_refused_unless_harmless(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, tie_word_embeddings=True)
    expected = logits(load(folder))
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(97, 64),
    }
    edit_weights(folder, lambda w: w.update(harmless))
    assert torch.equal(logits(load(folder)), expected)
    edit_weights(
        folder, lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
    )
    with pytest.raises(ModelError, match=r"q_norm\.weight in .* is not part of this model"):
        load(folder)


def test_untied_model_needs_its_head(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    edit_weights(folder, lambda w: w.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"weight lm_head\.weight is missing"):
        load(folder)


def test_quantised_weight_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    edit_weights(folder, lambda w: w.update({name: torch.zeros(64, 96, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"down_proj\.weight .* unsupported dtype torch\.int8"):
        load(folder)


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        load(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json: not a safetensors index"):
        load(folder)
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "gone.safetensors"}}))
    with pytest.raises(ModelError, match="is missing"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load(folder)
    with pytest.raises(ModelError, match=r"nowhere/config\.json: no such file"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures: MambaForCausalLM is not supp"),
        ({"architectures": None}, "architectures: none named"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rope type 'yarn' is not"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor: must be a positive number"),
        ({"hidden_size": "64"}, "hidden_size: must be a positive integer, got '64'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4 heads"),
        ({"head_dim": 15}, "head_dim: must be even"),
        ({"hidden_act": "gelu"}, "hidden_act: only silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantised"),
        ({"use_sliding_window": True}, "use_sliding_window: sliding-window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: sliding_attention"),
        ({"dtype": "float8"}, "dtype: 'float8' is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id: must be a token id or a list"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
    ],
)
def test_config_complaints_name_file_and_field(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = make_tiny(tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        ModelConfig.from_folder(folder)


def test_older_config_fields_mean_the_same(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, rope_parameters=LLAMA3_ROPE)
    new = ModelConfig.from_folder(folder)
    path = folder / "config.json"
    old = json.loads(path.read_text())
    rope = old.pop("rope_parameters")
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = rope
    old["torch_dtype"] = old.pop("dtype")
    path.write_text(json.dumps(old))
    assert ModelConfig.from_folder(folder) == new
    assert new.rope == RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 32)


def test_head_dim_defaults_to_hidden_over_heads(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    edit_config(folder, head_dim=None)
    assert ModelConfig.from_folder(folder).head_dim == 16


def test_end_ids_of_both_files_are_joined(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit_config(folder, eos_token_id=None)
    assert ModelConfig.from_folder(folder).eos_ids == ()
    edit_config(folder, eos_token_id=7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 7, 9]}))
    config = ModelConfig.from_folder(folder)
    assert config.eos_ids == (7, 8, 9)
    assert config.bos_id == 1


def test_llama3_scaling_keeps_fast_and_stretches_slow_pairs() -> None:
    rope = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    plain = inverse_frequencies(RopeConfig(500000.0), 128)
    scaled = inverse_frequencies(rope, 128)
    assert torch.equal(scaled[:20], plain[:20])
    torch.testing.assert_close(scaled[-10:], plain[-10:] / 8)


class Rank(TensorParallel):
    """A rank that is loaded but not run."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


def test_dummy_weights_depend_on_the_seed_and_not_on_the_split(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "qwen3", dtype=torch.bfloat16, vocab_size=98)
    (folder / "model.safetensors").unlink()
    first, again, other = (load(folder, load_format="dummy", seed=s) for s in (3, 3, 4))
    assert torch.equal(logits(first), logits(again))
    assert not torch.allclose(logits(first), logits(other))
    shards = [load(folder, load_format="dummy", seed=3, tp=Rank(r, 2)) for r in range(2)]
    assert sum(shard.weight_bytes for shard in shards) == first.weight_bytes

    source = RandomSource(torch.float32, torch.device("cpu"), 3)
    whole = source.read("w", (6, 10))
    halves = [source.read("w", (6, 10), Span(2, 6), Span(a, a + 5)) for a in (0, 5)]
    assert torch.equal(torch.cat(halves, dim=1), whole[2:6])
    assert not torch.equal(source.read("v", (6, 10)), whole)


def test_settings_out_of_range_are_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "float64"}, "dtype: must be auto, float32 or bfloat16"),
        ({"device": "tpu"}, "device: must be auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "device: cuda:99: this machine has"),
        ({"max_positions": 257}, "max_positions: 257 is more than the model's 256"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            load(folder, **settings)
    with pytest.raises(ConfigError, match="backend: must be auto"):
        make_backend("fast")
    with pytest.raises(ConfigError, match="backend: native computes in float32"):
        make_backend("native", "cpu", "bfloat16")


def test_rotary_tables_can_be_cut_to_what_is_used(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    model = load(folder, max_positions=12)
    assert model.max_positions == 12
    assert torch.equal(logits(model), logits(load(folder)))
    kv = model.make_kv(40, 4)
    ahead = build_batch([(list(range(40)), 12, [5] * (MAX_K * 2 + 2), 0)], 4)
    assert model.forward(ahead, kv).isfinite().all()
