"""Rows to Weights & Biases, for those who keep their runs there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bench.rows import Row
from ssd_pipe.errors import ConfigError

NUMBERS = ("tok_s", "throughput", "ttft", "itl_p50", "itl_p99", "tokens_per_round", "hit_rate")


class WandbLog:
    """A run of a project. Made by ``start``."""

    def __init__(self, wandb: Any, project: str) -> None:
        self._wandb = wandb
        self._project = project

    def log(self, heading: dict[str, Any], rows: Sequence[tuple[str, Row]]) -> None:
        """One table with every row, and each row's main figures in the summary.

        ``rows``: (part of the run, row).
        """
        with self._wandb.init(project=self._project, config=heading) as run:
            listed = [{"part": part, **msgspec.to_builtins(row)} for part, row in rows]
            names = ["part", *(name for name in Row.__struct_fields__ if name != "counters")]
            table = self._wandb.Table(columns=names)
            for row in listed:
                table.add_data(*(_cell(row[name]) for name in names))
            run.log({"rows": table})
            for row in listed:
                point = "".join(f" {axis}={value}" for axis, value in row["point"].items())
                label = f"{row['part']} {row['engine']} {row['set']}{point}"
                for name in NUMBERS:
                    if row[name] is not None:
                        run.summary[f"{label}/{name}"] = row[name]


def start(project: str) -> WandbLog:
    """Raises ConfigError if wandb is not installed, before anything is measured."""
    try:
        import wandb
    except ImportError:
        raise ConfigError("--wandb", "wandb is not installed here: pip install wandb") from None
    return WandbLog(wandb, project)


def _cell(value: Any) -> Any:
    """Tables of wandb hold numbers and texts."""
    return str(value) if isinstance(value, dict | list) else value
