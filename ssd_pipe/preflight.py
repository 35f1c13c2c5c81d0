"""Checks of a model pair that need no torch, made before any process is started."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import zmq

from ipc import sockets
from ipc.curve import KeyPair, KnownClients, load_pair
from models.config import ModelConfig
from models.folder import SINGLE_FILE, check_tokenizer, read_object, weight_map
from models.sharding import plan_shard
from ssd_pipe.config import ModelSection, PipelineConfig, RunSection, load_format
from ssd_pipe.dimensions import Dimensions, dimensions
from ssd_pipe.engine.synthetic import SyntheticOutcomes
from ssd_pipe.errors import ConfigError, ModelError, ResourceError
from ssd_pipe.hub import resolve
from ssd_pipe.threads import has_gpu

TOKENIZER_NAME = "tokenizer.json"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def check_settings(config: PipelineConfig) -> None:
    """Raise ConfigError for a device this machine lacks or acceptance that cannot be replayed."""
    for name, section in _models(config).items():
        if section.device.startswith("cuda") and not has_gpu():
            raise ConfigError(f"{name}.device", f"{section.device!r}, but there is no GPU here")
    SyntheticOutcomes.of(config.speculation)


def check_models(config: PipelineConfig) -> Dimensions:
    """Check the pair as far as is possible without loading it; returns the sizes they give.

    Raises ModelError (a model, file or weight that is missing or broken, a target without a
    tokenizer, or that cannot be split over its ranks) or ConfigError (two
    vocabularies, a limit the models do not have).
    """
    for section in _models(config).values():
        folder = resolve(section.model)
        if load_format(section) == "safetensors":
            for path in weight_files(folder):
                check_safetensors(path)
    check_tokenizer(resolve(config.target.model))
    plan_shard(ModelConfig.from_folder(resolve(config.target.model)), 0, config.target.tp)
    return dimensions(config)


def tokenizer_mismatch(config: PipelineConfig) -> str:
    """One line if draft and target carry tokenizers of different vocabularies, else empty.

    A draft without a ``tokenizer.json`` is taken for one of the target's. Only a warning: the
    answers stay the target's, but the draft reads and proposes other words than it means.
    Raises ModelError if a model is not here.
    """
    if not config.speculative:
        return ""
    names = config.target.model, config.draft.model
    target, draft = (resolve(name) / TOKENIZER_NAME for name in names)
    if not target.is_file() or not draft.is_file() or target.samefile(draft):
        return ""
    if _vocabulary(target) == _vocabulary(draft):
        return ""
    return (
        f"draft.model: the tokenizer of {names[1]} has another vocabulary than that of {names[0]}; "
        "few of its tokens will be accepted"
    )


def check_endpoint(run: RunSection) -> None:
    """Raise ResourceError if the public endpoint cannot be bound here, or a key is not usable."""
    if not run.endpoint:
        return
    pair = read_keys(run)
    try:
        sockets.bind(zmq.ROUTER, run.endpoint, pair=pair).close(0)
    except ResourceError as error:
        raise ResourceError(f"run.endpoint: {error}") from None


def read_keys(run: RunSection) -> KeyPair | None:
    """The public endpoint's keys, None if it has none. Raises ResourceError naming the setting."""
    field = "curve_secret_key"
    try:
        pair = load_pair(run.curve_secret_key) if run.curve_secret_key else None
        field = "curve_clients"
        if run.curve_clients:
            KnownClients(run.curve_clients)
    except ResourceError as error:
        raise ResourceError(f"run.{field}: {error}") from None
    return pair


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, single or sharded. Raises ModelError if one lacks."""
    named = weight_map(folder)
    names = {SINGLE_FILE} if named is None else set(named.values())
    files = [folder / name for name in sorted(names)]
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path}: weight file is missing")
    return files


def check_safetensors(path: Path) -> None:
    """Raise ModelError if the header cannot be read or the file ends before its last tensor."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{path}: not a safetensors file")
            header = json.loads(file.read(length))
        ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ModelError(f"{path}: not a safetensors file") from None
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise ModelError(f"{path}: cut short, has {size} bytes of {needed}")


def _models(config: PipelineConfig) -> dict[str, ModelSection]:
    """Sections of the models that are loaded, by name."""
    models: dict[str, ModelSection] = {"target": config.target}
    if config.speculative:
        models["draft"] = config.draft
    return models


def _vocabulary(path: Path) -> Any:
    """Of a tokenizer.json's model: token -> id, or for Unigram a list of [token, score]."""
    model = read_object(path).get("model")
    return model.get("vocab") if isinstance(model, dict) else None
