"""Fetching the models of a configuration, with a progress bar. Imports no torch unless a model has
to be converted."""

from __future__ import annotations

from ssd_pipe import hub
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import ModelError


def fetch_models(config: PipelineConfig) -> None:
    """Fetch the models of ``config`` that are not on this machine. Raises ModelError."""
    names = [config.target.model, *([config.draft.model] if config.speculative else [])]
    for name in names:
        try:
            hub.resolve(name)
        except ModelError:
            with hub.terminal_progress() as progress:
                hub.pull(name, progress)
