"""The paths in a configuration, for those who work in another folder than its author.

A run's processes, and whoever reads its ``config.json``, may have any working directory.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from ssd_pipe.config import PipelineConfig
from ssd_pipe.hub import BUILT_IN, is_folder
from ssd_pipe.shape_models import is_shape


def with_absolute_paths(config: PipelineConfig) -> PipelineConfig:
    """``config`` with its paths as they are meant in this process's working directory.

    A model that is no folder here keeps its name, as does an acceptance that is a rate.
    """
    run, spec = config.run, config.speculation
    return replace(
        config,
        target=replace(config.target, model=_model(config.target.model)),
        draft=replace(config.draft, model=_model(config.draft.model)),
        speculation=replace(spec, synthetic_acceptance=_acceptance(spec.synthetic_acceptance)),
        run=replace(
            run,
            shm_dir=str(Path(run.shm_dir).absolute()),
            log_dir=_path(run.log_dir),
            curve_secret_key=_path(run.curve_secret_key),
            curve_clients=_path(run.curve_clients),
        ),
    )


def _model(name: str) -> str:
    """In the order in which ``hub.resolve`` looks."""
    if is_shape(name) or name in BUILT_IN or not is_folder(name):
        return name
    return _path(name)


def _acceptance(given: str) -> str:
    try:
        float(given)
    except ValueError:
        return _path(given)
    return given


def _path(given: str) -> str:
    return str(Path(given).expanduser().absolute()) if given else ""
