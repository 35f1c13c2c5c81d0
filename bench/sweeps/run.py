"""Carries a sweep out: each engine started once for all it can serve, rows compared at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bench import bandwidth
from bench.bandwidth import Bandwidth
from bench.build import Builder
from bench.compare import Advance, Job, Sample, warm_up
from bench.engines import Engine, running
from bench.fan_out import at_temperature
from bench.figures import median
from bench.frames import BASELINES, layout
from bench.measure import run, trajectories
from bench.rows import Row, make_row, sample_record
from bench.sweeps import axes as ax
from bench.sweeps.axes import Axis
from bench.sweeps.plan import Cell, Group
from bench.trajectories import Trajectory, hits_after
from ssd_pipe.config import PipelineConfig


class Done(msgspec.Struct, kw_only=True):
    """A measured cell. ``samples``: as ``rows.sample_record`` keeps them."""

    cell: Cell
    row: Row
    samples: list[dict[str, Any]]
    trajectories: list[Trajectory]
    settings: dict[str, Any]


def steps(groups: Sequence[Group], jobs: int, repeats: int) -> int:
    """How often ``sweep`` calls ``advance``."""
    counts = [1 if cell.batch > 1 else jobs for group in groups for cell in group.cells]
    return len(groups) + repeats * sum(counts)


def sweep(
    groups: Sequence[Group],
    jobs: Sequence[Job],
    repeats: int,
    frame: str,
    builder: Builder,
    advance: Advance,
    keep: Callable[[Done], None],
) -> None:
    """Measure all groups; ``keep`` is given each cell as soon as it is measured.

    One engine runs at a time, so that sweeps fit where two would not.
    """
    measured: dict[str, Bandwidth] = {}
    for group in groups:
        engine = builder.engine(group.engine, frame, group.config)
        advance(f"loading {group.engine}")
        with running([engine]):
            where = layout(frame, group.engine)
            if where is not None and str(where.cpus) not in measured:
                measured[str(where.cpus)] = bandwidth.measure(where.threads, where.cpus)
            for cell in group.cells:
                band = None if where is None else measured[str(where.cpus)]
                keep(_measure(engine, cell, jobs, repeats, band, advance))


def _measure(
    engine: Engine,
    cell: Cell,
    jobs: Sequence[Job],
    repeats: int,
    band: Bandwidth | None,
    advance: Advance,
) -> Done:
    mine = [at_temperature(job, cell.temperature) for job in jobs]
    warm_up([engine], mine[0])

    def told(what: str) -> None:
        advance(what.replace(engine.name, cell.key))

    samples: list[Sample] = run([engine], mine, repeats, cell.batch, told)
    row = make_row(samples, engine.facts.weight_bytes, band)
    row.point = cell.point
    followed = trajectories(engine, mine, samples)
    for trajectory in followed:
        trajectory.point = cell.point
    row.hit_after_hit, row.hit_after_miss = hits_after(followed)
    return Done(
        cell=cell,
        row=row,
        samples=[sample_record(sample) for sample in samples],
        trajectories=followed,
        settings=engine.facts.settings,
    )


def add_comparisons(done: Sequence[Done], config: PipelineConfig, greedy: bool) -> None:
    """Each row's speed-up over AR and SD with those of its settings that concern them, and the
    share of its answers that equal AR's."""
    by_key = {each.cell.key: each for each in done}
    for each in done:
        for name in BASELINES:
            point = ax.relevant(name, each.cell.point, config, greedy)
            base = by_key.get(ax.key(name, point))
            if base is None or base is each:
                continue
            repeats = zip(each.row.tok_s_repeats, base.row.tok_s_repeats, strict=False)
            over = median([ours / theirs for ours, theirs in repeats])
            if over is not None:
                each.row.speedup[name] = over
            if name == "ar":
                each.row.same_tokens = _same(each.samples, base.samples)


def axes_of(axes: Sequence[Axis]) -> dict[str, list[Any]]:
    """As the results file has them."""
    return {axis.name: list(axis.values) for axis in axes}


def _same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float | None:
    wanted = {(s["set"], s["prompt"], s["repeat"]): s["tokens"] for s in theirs}
    found = [s["tokens"] == wanted.get((s["set"], s["prompt"], s["repeat"])) for s in ours]
    return sum(found) / len(found) if found else None
