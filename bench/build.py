"""From an engine's name to the engine: ours, transformers, or a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.engines import Engine, PipelineEngine
from bench.frames import WIDE, in_frame, layout, mode_of, placed
from bench.servers import launch
from bench.servers.engine import ServerEngine
from bench.transformers_engine import TransformersEngine
from models.config import ModelConfig
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import ConfigError
from ssd_pipe.hub import resolve
from ssd_pipe.text.tokenizer import Tokenizer
from ssd_pipe.threads import available_cores

PIPELINES = ("ar", "sd", "ssd", WIDE)
TRANSFORMERS = ("transformers", "assisted")
USUAL = (*PIPELINES, *TRANSFORMERS)
ENGINES = (*USUAL, *launch.NAMES)
SEPARATE = (*launch.VLLM, *launch.SGLANG)
"""Engines that take the memory of their device for themselves, and so run alone."""


class Builder(msgspec.Struct, frozen=True, kw_only=True):
    """What engines need besides their configuration.

    ``servers``: URLs of servers that run already, by engine name; ``key``: their bearer token.
    """

    tokenizer: Tokenizer
    host_cpus: list[int]
    servers: dict[str, str] = {}
    key: str = ""

    def engine(self, name: str, frame: str, config: PipelineConfig, label: str = "") -> Engine:
        """The engine called ``name``, not started; ``label`` is what its rows call it."""
        label = label or name
        where = layout(frame, name)
        if name in self.servers:
            return ServerEngine(label, self.tokenizer, url=self.servers[name], key=self.key)
        if name in PIPELINES:
            return PipelineEngine(label, placed(config, mode_of(name), where, self.host_cpus))
        if name in TRANSFORMERS:
            return self._transformers(name, frame, config, label)
        return self._server(name, frame, config, label)

    def engines(self, names: Sequence[str], frame: str, config: PipelineConfig) -> list[Engine]:
        """Those of ``names`` that make sense in a frame. Raises ConfigError if none does."""
        chosen = [name for name in names if in_frame(frame, name)]
        if not chosen:
            raise ConfigError("--engines", f"none of them is in frame {frame}")
        return [self.engine(name, frame, config) for name in chosen]

    def _transformers(self, name: str, frame: str, config: PipelineConfig, label: str) -> Engine:
        where = layout(frame, name)
        on_gpu = where is None and config.target.device.startswith("cuda")
        return TransformersEngine(
            label,
            resolve(config.target.model),
            resolve(config.draft.model) if name == "assisted" else None,
            where.threads if where else len(available_cores()),
            where.cpus if where else (),
            device=config.target.device if on_gpu else "cpu",
            dtype="bfloat16" if on_gpu and config.target.dtype != "float32" else "float32",
        )

    def _server(self, name: str, frame: str, config: PipelineConfig, label: str) -> Engine:
        if name in launch.OURS:
            own = placed(config, launch.OURS[name], layout(frame, name), self.host_cpus)

            def start(port: int, folder: Path) -> list[str]:
                return launch.own(own, port, folder)

        else:
            launch.check_installed(name)
            served = served_by(config)

            def start(port: int, folder: Path) -> list[str]:
                return launch.command(name, served, port)

        key = os.environ.get("SSD_API_KEY", "") if name in launch.OURS else ""
        return ServerEngine(label, self.tokenizer, start, model=launch.MODEL_NAME, key=key)


def served_by(config: PipelineConfig) -> launch.Served:
    """What another engine's server is to serve so that it does what our pipeline does."""
    target = resolve(config.target.model)
    return launch.Served(
        target=target,
        draft=resolve(config.draft.model),
        k=config.speculation.k,
        tp=config.target.tp,
        dtype=config.target.dtype,
        max_model_len=config.scheduler.max_model_len
        or ModelConfig.from_folder(target).max_positions,
        seqs=config.scheduler.max_num_seqs,
        seed=0,
    )


def check(names: Sequence[str], servers: dict[str, str]) -> None:
    """Raises ConfigError for an engine that is unknown, or not installed and not running."""
    for name in names:
        if name in servers:
            continue
        if name not in ENGINES:
            raise ConfigError("--engines", f"{name!r} is none of: {', '.join(ENGINES)}")
        launch.check_installed(name)


def waves(names: Sequence[str], one_at_a_time: bool) -> list[list[str]]:
    """Names of engines that run side by side; those that cannot share a device run alone."""
    if one_at_a_time:
        return [[name] for name in names]
    together = [name for name in names if name not in SEPARATE]
    apart = [[name] for name in names if name in SEPARATE]
    return [together, *apart] if together else apart
