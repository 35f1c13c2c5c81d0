"""The command line of ``ssd-pipe bench --load``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import prompts
from bench.lists import integers, names, numbers
from bench.load.traffic import Traffic
from bench.results import output_file
from ssd_pipe.config import MODES, Mode, PipelineConfig
from ssd_pipe.config_load import load, parse_set
from ssd_pipe.errors import ConfigError
from ssd_pipe.params import SamplingParams

CONCURRENCY = (1, 4, 16, 64)


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done.

    Attributes:
        modes: pipelines to start and compare; empty = a running server.
        url: an OpenAI-compatible server; empty = ours, over ZeroMQ.
        endpoint, run: of a running pipeline.
        traffic: arrivals, one after the other.
        repeats: passes over all of them; the mode that begins changes from pass to pass.
    """

    modes: list[Mode]
    url: str
    model: str
    api_key: str
    endpoint: str
    run: str
    traffic: list[Traffic]
    prompt_set: str
    params: SamplingParams
    repeats: int
    seed: int
    config: PipelineConfig
    save_samples: bool
    output: Path | None


def parse(arguments: Sequence[str]) -> LoadPlan:
    """Raises ConfigError; argparse exits with 2 for a wrong option, with 0 after --help."""
    given = _parser().parse_args(arguments)
    for mode in given.modes:
        if mode not in MODES:
            raise ConfigError("--modes", f"{mode!r} is none of: {', '.join(MODES)}")
    if given.modes and (given.url or given.endpoint or given.run):
        raise ConfigError("--modes", "starts pipelines; --url, --endpoint and --run name a server")
    prompts.load(given.prompt_set, 1)
    params = SamplingParams(
        max_tokens=given.tokens,
        temperature=given.temperature,
        seed=given.seed,
        ignore_eos=not given.stop_at_eos,
    )
    params.validate()
    traffic = _traffic(given)
    return LoadPlan(
        modes=given.modes,
        url=given.url,
        model=given.model,
        api_key=given.api_key,
        endpoint=given.endpoint,
        run=given.run,
        traffic=traffic,
        prompt_set=given.prompt_set,
        params=params,
        repeats=_positive("--repeats", given.repeats),
        seed=given.seed,
        config=_config(given, max(t.concurrency for t in traffic)),
        save_samples=given.save_samples,
        output=given.output,
    )


def _traffic(given: argparse.Namespace) -> list[Traffic]:
    if given.request_rate:
        limit = given.concurrency[0] if given.concurrency else 0
        if given.concurrency and len(given.concurrency) > 1:
            raise ConfigError("--concurrency", "one limit at most beside --request-rate")
        count = _positive("--num-prompts", given.num_prompts or 64)
        if min(given.request_rate) <= 0:
            raise ConfigError("--request-rate", "must be above 0")
        return [Traffic(concurrency=limit, rate=r, requests=count) for r in given.request_rate]
    users = [_positive("--concurrency", c) for c in given.concurrency or CONCURRENCY]
    counts = [_positive("--num-prompts", given.num_prompts or max(8, 2 * c)) for c in users]
    return [Traffic(concurrency=c, requests=n) for c, n in zip(users, counts, strict=True)]


def _config(given: argparse.Namespace, users: int) -> PipelineConfig:
    # A prompt that comes again is to cost what it cost first; --set can have it otherwise.
    overrides: dict[str, Any] = {"cache.prefix_caching": False}
    overrides |= dict(parse_set(text) for text in given.set)
    settings = {"target.model": given.target, "draft.model": given.draft}
    settings |= {"run.log_dir": given.log_dir}
    overrides |= {name: value for name, value in settings.items() if value is not None}
    config = load(given.config, overrides)
    if config.run.name or config.run.endpoint:
        raise ConfigError("run.name", "and run.endpoint cannot be set here: several pipelines run")
    if config.scheduler.max_waiting < users:
        waiting = msgspec.structs.replace(config.scheduler, max_waiting=users)
        config = msgspec.structs.replace(config, scheduler=waiting)
    return config


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise ConfigError(option, f"must be at least 1, got {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ssd-pipe bench --load",
        description="Throughput and latencies under load, as vllm bench serve prints them. Without "
        "--modes, --url, --endpoint or --run: the pipeline that runs on this machine.",
    )
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    server = parser.add_argument_group("who answers")
    server.add_argument(
        "--modes", type=names, default=[], metavar="ar,sd,ssd", help="start these, compare them"
    )
    server.add_argument("--url", default="", help="OpenAI-compatible server, ours or another's")
    server.add_argument("--model", default="", help="its name there (the first it offers)")
    server.add_argument("--api-key", default="", metavar="KEY", help="of the server at --url")
    server.add_argument("--endpoint", default="", metavar="ADDRESS", help="ZeroMQ, of a pipeline")
    server.add_argument("--run", default="", metavar="NAME", help="of a running pipeline")
    arrivals = parser.add_argument_group("arrivals")
    arrivals.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=integers,
        default=[],
        metavar="LIST",
        help="closed loop: so many requests at once (1,4,16,64); with --request-rate the most",
    )
    arrivals.add_argument(
        "--request-rate",
        type=numbers,
        default=[],
        metavar="LIST",
        help="Poisson arrivals: requests a second",
    )
    arrivals.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help="requests of each load (closed loop: max(8, 2 x concurrency); at a rate: 64)",
    )
    arrivals.add_argument("--repeats", type=int, default=1, metavar="N", help="passes (1)")
    arrivals.add_argument("--seed", type=int, default=1, help="of arrivals and sampling (1)")
    request = parser.add_argument_group("requests")
    request.add_argument(
        "--prompt-set", default="humaneval-style", metavar="NAME", help="(humaneval-style)"
    )
    request.add_argument("--tokens", type=int, default=128, metavar="N", help="of an answer (128)")
    request.add_argument("--temperature", type=float, default=0.0, help="(0)")
    request.add_argument("--stop-at-eos", action="store_true", help="else answers have all tokens")
    setting = parser.add_argument_group("settings of started pipelines")
    setting.add_argument("--config", type=Path, metavar="FILE", help="TOML file")
    setting.add_argument("--target", metavar="MODEL", help="folder, hub id or built-in name")
    setting.add_argument("--draft", metavar="MODEL", help="likewise")
    setting.add_argument("--log-dir", metavar="DIR", help="parent of the runs' log folders")
    setting.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any setting"
    )
    parser.add_argument("--save-samples", action="store_true", help="every request in the results")
    parser.add_argument(
        "--output",
        type=output_file,
        metavar="FILE",
        help="results file (JSON), or a folder for it [bench/results/]",
    )
    return parser
