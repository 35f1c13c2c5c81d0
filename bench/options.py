"""The benchmark's command line, checked, as a plan."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench import build, datasets, fan_out, frames
from bench.fan_out import Grid
from bench.parser import parser
from bench.plan import FULL, QUICK, Plan
from bench.sweeps import axes, rules_study
from bench.sweeps.axes import Axis
from ssd_pipe.config import MODES, PipelineConfig
from ssd_pipe.config_load import load, parse_fan_out, parse_set
from ssd_pipe.errors import ConfigError
from ssd_pipe.openai_api import api_url
from ssd_pipe.params import SamplingParams

OWN_RUNS = ("run.name", "run.endpoint")
USUAL_SETS = ("humaneval-style",)


def parse(arguments: Sequence[str]) -> Plan:
    """Raises ConfigError; argparse exits with 2 for a wrong option, with 0 after --help."""
    given = parser().parse_args(arguments)
    usual = {**(QUICK if given.quick else FULL)}
    if given.rules_study:
        usual |= rules_study.SIZE

    def count(name: str) -> int:
        value = getattr(given, name)
        if value is None:
            return usual[name]
        if value < 1:
            raise ConfigError(f"--{name}", f"must be at least 1, got {value}")
        return int(value)

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
    config = _config(given)
    swept = _swept(given)
    servers = dict(_server(text) for text in given.server)
    engines = _engines(given, servers, bool(swept))
    apart = bool(swept or given.fan_out_table or given.exactness is not None)
    wanted = given.frames or _usual_frames(given, config, apart)
    for frame in wanted:
        frames.layout(frame, engines[0])
    return Plan(
        frames=[] if swept else wanted,
        fan_out_table=given.fan_out_table,
        exactness=exactness,
        sweep=swept,
        sweep_frame=(wanted or _usual_frames(given, config, False))[0],
        grid=Grid(
            allocations=_among("--allocations", given.allocations, fan_out.ALLOCATIONS),
            rules=_among("--rules", given.rules, fan_out.RULES),
            temperatures=tuple(given.temperatures),
            budgets=tuple(given.budgets),
        ),
        engines=engines,
        servers=servers,
        one_at_a_time=given.one_at_a_time,
        sets=[] if given.all else _sets(given),
        prompts=count("prompts"),
        tokens=count("tokens"),
        repeats=count("repeats"),
        batch=count("batch"),
        params=params,
        config=config,
        host_cpus=given.host_cpus,
        output=given.output,
        trajectories=given.save_trajectories,
        trace=given.save_trace,
        wandb=given.wandb,
    )


def modes(engines: Sequence[str]) -> list[Any]:
    """Pipeline modes among ``engines``. Raises ConfigError if there is none."""
    chosen = [mode for mode in MODES if mode in engines]
    if not chosen:
        raise ConfigError("--engines", f"none of {', '.join(MODES)} is among them")
    return chosen


def _swept(given: argparse.Namespace) -> list[Axis]:
    parsed = [axes.parse(text) for text in given.sweep]
    return rules_study.axes(parsed) if given.rules_study else parsed


def _engines(given: argparse.Namespace, servers: dict[str, str], swept: bool) -> list[str]:
    usual = MODES if swept else build.USUAL if given.batch == 1 else build.PIPELINES
    named: list[str] = given.engines or list(usual)
    named += [name for name in servers if name not in named]
    build.check(named, servers)
    if given.batch > 1 and (single := [n for n in named if n in build.TRANSFORMERS]):
        raise ConfigError("--batch", f"{single[0]} answers one request at a time")
    return named


def _server(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url:
        raise ConfigError("--server", f"must look like name=http://HOST:PORT, got {text!r}")
    return name, api_url(url, "--server")


def _usual_frames(given: argparse.Namespace, config: PipelineConfig, apart: bool) -> list[str]:
    """Those of a run that names none: none of them if there is something else to do."""
    if apart:
        return []
    usual = frames.usual(config)
    return usual[:1] if given.quick or given.sweep or given.rules_study else usual


def _sets(given: argparse.Namespace) -> list[str]:
    if given.datasets:
        return list(_among("--datasets", given.datasets, datasets.names()))
    if given.prompt_set:
        return list(_among("--prompt-set", [given.prompt_set], datasets.names()))
    return list(rules_study.SETS if given.rules_study else USUAL_SETS)


def _config(given: argparse.Namespace) -> PipelineConfig:
    # A prompt that comes again is to cost what it cost first, and a method is measured as it is
    # set; --set can have it otherwise.
    overrides: dict[str, Any] = {"cache.prefix_caching": False, "speculation.adaptive": False}
    overrides |= dict(parse_set(text) for text in given.set)
    for name in OWN_RUNS:
        if name in overrides:
            raise ConfigError(name, "cannot be set here: several pipelines run at once")
    settings = {
        "target.model": given.target,
        "draft.model": given.draft,
        "target.tp": given.tp,
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
