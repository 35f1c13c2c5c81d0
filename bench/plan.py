"""What a benchmark run is to do."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.fan_out import Grid
from bench.sweeps.axes import Axis
from ssd_pipe.config import PipelineConfig
from ssd_pipe.params import SamplingParams

FULL = {"prompts": 16, "tokens": 128, "repeats": 3, "exactness": 50}
QUICK = {"prompts": 3, "tokens": 48, "repeats": 1, "exactness": 6}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        frames: comparisons side by side.
        exactness: number of prompts, 0 = not asked for.
        sweep: its axes; empty = no sweep.
        sweep_frame: which process computes on which cores in it.
        servers: URLs of servers that run already, by engine name.
        one_at_a_time: start each engine alone.
        sets: prompt sets; empty = every published one that is to be had.
        prompts: of each set.
        batch: requests under way at a time.
        params: of every request, with the seed of a set's first one.
        trajectories, trace: files to write, None = not asked for.
        wandb: project, empty = not asked for.
    """

    frames: list[str]
    fan_out_table: bool
    exactness: int
    sweep: list[Axis]
    sweep_frame: str
    grid: Grid
    engines: list[str]
    servers: dict[str, str]
    one_at_a_time: bool
    sets: list[str]
    prompts: int
    tokens: int
    repeats: int
    batch: int
    params: SamplingParams
    config: PipelineConfig
    host_cpus: list[int]
    output: Path | None
    trajectories: Path | None
    trace: Path | None
    wandb: str
