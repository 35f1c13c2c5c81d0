"""``ssd-pipe run``: one process of a run, in the foreground, with or without a supervisor."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import sys

import msgspec

from ipc.rundir import RunDir
from ssd_pipe.cli.options import ConfigSource
from ssd_pipe.config import PipelineConfig
from ssd_pipe.config_load import decode
from ssd_pipe.config_paths import with_absolute_paths
from ssd_pipe.errors import ConfigError
from ssd_pipe.footprint import shared_bytes
from ssd_pipe.members import SUPERVISOR_VARIABLE, process_count
from ssd_pipe.preflight import check_models, check_settings
from ssd_pipe.threads import check_cpus, thread_environment

DEFAULT_RUN = "local"
PLACE_SETTINGS = {"run.name", "run.shm_dir"}
"""Settings that say which run is meant, not how it is configured."""


def run_single(source: ConfigSource, role: str, rank: int) -> int:
    """Join the run, or make it if it is not alive, and be one of its processes.

    The run's configuration is the one its first process brought. Raises ConfigError if this
    process was given another one, or is not part of the run.
    """
    asked = _named(with_absolute_paths(source.load()))
    if role == "gateway":
        asked = msgspec.structs.replace(
            asked, gateway=msgspec.structs.replace(asked.gateway, enabled=True)
        )
    with _join(asked) as run_dir:
        config = _publish(run_dir, asked)
        if config != asked and (source.path is not None or set(source.overrides) - PLACE_SETTINGS):
            raise ConfigError(
                "run.name",
                f"run {run_dir.name!r} is alive with another configuration; join it without "
                "options, or name another run",
            )
        _check_part(config, role, rank)
        check_cpus(config)
        os.environ.update(thread_environment(config, role))  # before torch is imported
        runtime = importlib.import_module("procs.runtime")
        body = importlib.import_module(f"procs.{role}").run
        alone = SUPERVISOR_VARIABLE not in os.environ and not sys.stderr.isatty()
        status: int = runtime.run_process(role, config, body, rank=rank, announces=alone)
        return status


def _named(config: PipelineConfig) -> PipelineConfig:
    run = msgspec.structs.replace(config.run, name=config.run.name or DEFAULT_RUN)
    return msgspec.structs.replace(config, run=run)


def _join(config: PipelineConfig) -> RunDir:
    run = config.run
    if SUPERVISOR_VARIABLE in os.environ:
        return RunDir.open(run.shm_dir, run.name)
    check_settings(config)
    sizes = check_models(config)
    needed = shared_bytes(config, sizes.vocab_size, sizes.max_model_len)
    return RunDir.create_or_open(run.shm_dir, run.name, needed)


def _publish(run_dir: RunDir, config: PipelineConfig) -> PipelineConfig:
    """Write ``config.json`` if nobody has; returns what it says then."""
    if not run_dir.config.exists():
        fresh = run_dir.path / f".config-{secrets.token_hex(4)}"
        fresh.write_bytes(msgspec.json.encode(config))
        # A hard link appears with its content and fails if another process was first.
        with contextlib.suppress(FileExistsError):
            os.link(fresh, run_dir.config)
        fresh.unlink()
    return decode(run_dir.config.read_bytes())


def _check_part(config: PipelineConfig, role: str, rank: int) -> None:
    if role == "draft" and not config.speculative:
        raise ConfigError("mode", "'ar' has no draft process")
    if role == "gateway" and not config.gateway.enabled:
        raise ConfigError(
            "gateway.enabled", f"run {config.run.name!r} was started without a gateway (--http)"
        )
    ranks = process_count(config, role)
    if rank >= ranks:
        raise ConfigError("--rank", f"{role} has ranks 0..{ranks - 1}, got {rank}")
