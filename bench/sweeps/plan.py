"""From axes to the measurements of a sweep: which engine with which settings, each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bench.sweeps import axes as ax
from bench.sweeps.axes import Axis, Point
from ssd_pipe.config import PipelineConfig, config_from_mapping
from ssd_pipe.config_load import check_combination
from ssd_pipe.params import SamplingParams


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One row to come: requests at ``temperature``, ``batch`` of them at a time."""

    engine: str
    point: Point
    temperature: float
    batch: int

    @property
    def key(self) -> str:
        return ax.key(self.engine, self.point)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Cells that one start of an engine serves."""

    engine: str
    config: PipelineConfig
    cells: list[Cell]


def plan(
    axes: Sequence[Axis],
    engines: Sequence[str],
    config: PipelineConfig,
    params: SamplingParams,
    batch: int,
) -> list[Group]:
    """Every measurement, baselines first. Raises ConfigError for a combination that cannot be."""
    ax.check(axes, engines, config)
    groups: dict[str, Group] = {}
    seen = set()
    for engine in engines:
        for whole in ax.points(axes):
            point = ax.relevant(engine, whole, config, params.temperature == 0)
            cell = Cell(
                engine=engine,
                point=point,
                temperature=point.get(ax.TEMPERATURE, params.temperature),
                batch=point.get(ax.BATCH, batch),
            )
            if cell.key in seen:
                continue
            seen.add(cell.key)
            most = max([batch, *(v for axis in axes if axis.name == ax.BATCH for v in axis.values)])
            changed = configured(config, point, most)
            name = f"{engine} {changed.digest()}"
            if name not in groups:
                groups[name] = Group(engine=engine, config=changed, cells=[])
            groups[name].cells.append(cell)
    return list(groups.values())


def configured(config: PipelineConfig, point: Point, batch: int) -> PipelineConfig:
    """``config`` with the settings of ``point`` and room for ``batch`` requests.

    A list of branch counts is taken as it is unless an axis says how to allocate. Raises
    ConfigError.
    """
    mapping: dict[str, Any] = msgspec.to_builtins(config)
    for name, value in point.items():
        if name in ax.OF_REQUESTS:
            continue
        section, _, field = ax.SETTINGS.get(name, name).partition(".")
        if field:
            mapping[section][field] = value
        else:
            mapping[section] = value
    if isinstance(point.get(ax.FAN_OUT), list) and "allocation" not in point:
        mapping["speculation"]["allocation"] = "fixed"
    scheduler = mapping["scheduler"]
    scheduler["max_num_seqs"] = max(scheduler["max_num_seqs"], batch)
    rows = scheduler["max_num_seqs"] * (mapping["speculation"]["k"] + 1)
    scheduler["max_batched_tokens"] = max(scheduler["max_batched_tokens"], rows)
    changed = config_from_mapping(mapping)
    check_combination(changed)
    return changed
