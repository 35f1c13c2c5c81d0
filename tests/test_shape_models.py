"""``shape:NAME`` is an ordinary model folder, except that it has no weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.config import ModelConfig
from models.published import SHAPES
from ssd_pipe.config import config_from_mapping, load_format
from ssd_pipe.errors import ConfigError, ModelError
from ssd_pipe.hub import resolve
from ssd_pipe.preflight import check_models
from ssd_pipe.shape_models import shape_folder
from ssd_pipe.text.detokenizer import DetokenizerFactory
from ssd_pipe.text.tokenizer import Tokenizer


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_shape_reads_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    folder = shape_folder(f"shape:{name}", tmp_path)
    assert ModelConfig.from_folder(folder) == SHAPES[name]
    assert shape_folder(f"shape:{name}", tmp_path) == folder
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_any_token_id_of_a_shape_has_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(shape_folder("shape:llama-3.1-8b", tmp_path))
    assert tokenizer.encode("ab") != []
    detokenizer = DetokenizerFactory(tokenizer).new()
    assert detokenizer.push([*tokenizer.encode("ab"), 128255]) == "ab"


def test_a_pair_of_shapes_passes_the_checks_without_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    pair = {"target": {"model": "shape:llama-3.1-8b"}, "draft": {"model": "shape:llama-3.2-1b"}}
    config = config_from_mapping(pair | {"scheduler": {"max_model_len": 512}})
    assert load_format(config.target) == "dummy"
    assert check_models(config).vocab_size == 128256
    config = config_from_mapping(pair | {"target": {**pair["target"], "tp": 12}})
    with pytest.raises(ModelError, match="32 heads with 8 KV heads cannot be split over tp = 12"):
        check_models(config)


def test_an_unknown_shape_and_weights_of_a_shape_are_refused() -> None:
    with pytest.raises(ModelError, match="no shape 'gpt-9'"):
        resolve("shape:gpt-9")
    with pytest.raises(ConfigError, match="has no weight files"):
        config_from_mapping({"target": {"model": "shape:qwen3-32b", "load_format": "safetensors"}})
