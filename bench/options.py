"""The benchmark's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import fan_out, frames
from bench.exactness import MODES
from bench.fan_out import Grid
from ssd_pipe.config import PipelineConfig
from ssd_pipe.config_load import load, parse_fan_out, parse_set
from ssd_pipe.errors import ConfigError
from ssd_pipe.params import SamplingParams

ENGINES = ("ar", "sd", "ssd", "ssd-wide-draft", "transformers", "assisted")
OWN_RUNS = ("run.name", "run.endpoint")
FULL = {"prompts": 16, "tokens": 128, "repeats": 3, "exactness": 50}
QUICK = {"prompts": 3, "tokens": 48, "repeats": 1, "exactness": 6}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done. ``exactness``: number of prompts, 0 = not asked for."""

    frames: list[str]
    fan_out_table: bool
    exactness: int
    grid: Grid
    engines: list[str]
    prompt_set: str
    prompts: int
    tokens: int
    repeats: int
    params: SamplingParams
    config: PipelineConfig
    host_cpus: list[int]
    output: Path | None


def parse(arguments: Sequence[str]) -> Plan:
    """Raises ConfigError; argparse exits with 2 for a wrong option, with 0 after --help."""
    given = _parser().parse_args(arguments)
    usual = QUICK if given.quick else FULL

    def count(name: str) -> int:
        value = getattr(given, name)
        if value is None:
            return usual[name]
        if value < 1:
            raise ConfigError(f"--{name}", f"must be at least 1, got {value}")
        return int(value)

    nothing_asked = not (given.fan_out_table or given.exactness is not None)
    wanted = given.frames or (list(frames.NAMES) if nothing_asked else [])
    for frame in wanted:
        frames.layouts(frame)
    exactness = 0
    if given.exactness is not None:
        exactness = given.exactness or usual["exactness"]
    params = SamplingParams(
        max_tokens=count("tokens"),
        temperature=given.temperature,
        seed=given.seed,
        ignore_eos=given.ignore_eos,
    )
    params.validate()
    return Plan(
        frames=wanted,
        fan_out_table=given.fan_out_table,
        exactness=exactness,
        grid=Grid(
            allocations=_among("--allocations", given.allocations, fan_out.ALLOCATIONS),
            rules=_among("--rules", given.rules, fan_out.RULES),
            temperatures=tuple(given.temperatures),
            budgets=tuple(given.budgets),
        ),
        engines=list(_among("--engines", given.engines, ENGINES)),
        prompt_set=given.prompt_set,
        prompts=count("prompts"),
        tokens=count("tokens"),
        repeats=count("repeats"),
        params=params,
        config=_config(given),
        host_cpus=given.host_cpus,
        output=given.output,
    )


def modes(engines: Sequence[str]) -> list[Any]:
    """Pipeline modes among ``engines``. Raises ConfigError if there is none."""
    chosen = [mode for mode in MODES if mode in engines]
    if not chosen:
        raise ConfigError("--engines", f"none of {', '.join(MODES)} is among them")
    return chosen


def _config(given: argparse.Namespace) -> PipelineConfig:
    # A prompt that comes again is to cost what it cost first; --set can have it otherwise.
    overrides: dict[str, Any] = {"cache.prefix_caching": False}
    overrides |= dict(parse_set(text) for text in given.set)
    for name in OWN_RUNS:
        if name in overrides:
            raise ConfigError(name, "cannot be set here: several pipelines run at once")
    settings = {
        "target.model": given.target,
        "draft.model": given.draft,
        "speculation.k": given.k,
        "speculation.fan_out": None if given.fan_out is None else parse_fan_out(given.fan_out),
        "speculation.allocation": given.allocation,
        "speculation.rule": given.rule,
        "speculation.backup": given.backup,
        "run.log_dir": given.log_dir,
    }
    overrides |= {name: value for name, value in settings.items() if value is not None}
    config = load(given.config, overrides)
    if config.run.name or config.run.endpoint:
        raise ConfigError("run.name", "and run.endpoint cannot be set here: several pipelines run")
    return config


def _among(option: str, names: Sequence[str], known: Sequence[Any]) -> tuple[Any, ...]:
    for name in names:
        if name not in known:
            raise ConfigError(option, f"{name!r} is none of: {', '.join(known)}")
    return tuple(names)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _integers(text: str) -> list[int]:
    return [int(part) for part in _names(text)]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in _names(text)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ssd-pipe bench",
        description="Compare engines on the same prompts, measure hit rates, check exactness. "
        "Without a choice: both frames.",
    )
    what = parser.add_argument_group("what to do")
    what.add_argument(
        "--frames", type=_names, metavar="a,b", help="a: one core for the target; b: all cores"
    )
    what.add_argument(
        "--fan-out-table", action="store_true", help="hit rate by allocation and rule"
    )
    what.add_argument(
        "--exactness",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="tokens against transformers' on N prompts (50); status 1 if any differs",
    )
    what.add_argument("--quick", action="store_true", help="fewer prompts, tokens and repeats")
    size = parser.add_argument_group("how much")
    size.add_argument("--prompt-set", default="humaneval-style", metavar="NAME")
    size.add_argument("--prompts", type=int, metavar="N", help="prompts of the set (16)")
    size.add_argument("--tokens", type=int, metavar="N", help="most tokens an answer (128)")
    size.add_argument("--repeats", type=int, metavar="N", help="passes over the prompts (3)")
    size.add_argument("--temperature", type=float, default=0.0, help="of the frames (0)")
    size.add_argument("--seed", type=int, default=1, help="of the first prompt (1)")
    size.add_argument("--ignore-eos", action="store_true")
    size.add_argument(
        "--engines", type=_names, default=list(ENGINES), metavar="LIST", help=",".join(ENGINES)
    )
    grid, default = parser.add_argument_group("fan-out table"), Grid()
    grid.add_argument("--allocations", type=_names, default=default.allocations, metavar="LIST")
    grid.add_argument("--rules", type=_names, default=default.rules, metavar="LIST")
    grid.add_argument("--temperatures", type=_numbers, default=default.temperatures, metavar="LIST")
    grid.add_argument("--budgets", type=_integers, default=default.budgets, metavar="LIST")
    setting = parser.add_argument_group("settings of the pipeline")
    setting.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    setting.add_argument("--target", metavar="MODEL")
    setting.add_argument("--draft", metavar="MODEL")
    setting.add_argument("--k", type=int)
    setting.add_argument("--fan-out", metavar="N|LIST")
    setting.add_argument("--allocation", metavar="NAME")
    setting.add_argument("--rule", metavar="NAME")
    setting.add_argument("--backup", metavar="NAME")
    setting.add_argument("--log-dir", metavar="DIR")
    setting.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any setting"
    )
    parser.add_argument(
        "--host-cpus",
        type=_integers,
        default=[],
        metavar="LIST",
        help="cores for frontend and scheduler in the frames (a: the second, b: any)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="results file (JSON)")
    return parser
