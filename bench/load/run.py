"""Runs loads against one or several servers and says what came of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import prompts
from bench.engines import PipelineEngine, running
from bench.figures import difference, median
from bench.load.clients import LoadClient, OpenAIClient, PipelineClient, Sample
from bench.load.options import LoadPlan, parse
from bench.load.summary import Summary, summarise, text
from bench.load.traffic import Traffic, drive
from bench.prompts import Prompt
from bench.tables import number
from bench.workload import SLACK
from models.config import ModelConfig
from ssd_pipe.config import PipelineConfig
from ssd_pipe.endpoint import NoPipeline, find_endpoint
from ssd_pipe.errors import ConfigError
from ssd_pipe.hub import resolve
from ssd_pipe.params import SamplingParams
from ssd_pipe.text.tokenizer import Tokenizer

WARM_UP = Traffic(concurrency=2, requests=2)
WARM_UP_TOKENS = 16


class Load(msgspec.Struct, kw_only=True):
    """One load on one server. ``counters``: what a pipeline counted meanwhile."""

    server: str
    traffic: Traffic
    repeat: int
    summary: Summary
    counters: dict[str, float] = {}
    samples: list[Sample] = []


@dataclass(frozen=True, kw_only=True)
class Server:
    """Something to be loaded: how to reach it, and its counters if it tells them."""

    name: str
    client: Callable[[], LoadClient]
    counters: Callable[[], dict[str, float]] = dict
    facts: dict[str, Any] = field(default_factory=dict)


def main(arguments: Sequence[str]) -> int:
    """``ssd-pipe bench --load``; returns 0, or 1 if a request failed. Raises SsdPipeError."""
    plan = parse(arguments)
    from bench import machine
    from bench.results import Results

    described = msgspec.to_builtins(plan, enc_hook=str)
    described.pop("api_key")
    heading = machine.describe(["ssd-pipe", "bench", *_without_key(arguments)])
    results = Results(plan.output, {**heading, "plan": described})
    out = Console(width=None if sys.stdout.isatty() else 180)
    chosen = prompts.SETS[plan.prompt_set]()
    loads: list[Load] = []
    try:
        with _servers(plan, chosen) as servers:
            results.describe("servers", {server.name: server.facts for server in servers})
            for load in _loads(plan, servers, chosen):
                loads.append(load)
                results.add("loads", loads)
                title = f"{load.server}, {load.traffic}" if plan.modes else str(load.traffic)
                out.print(text(title, load.summary), markup=False, highlight=False)
    finally:
        if plan.modes and loads:
            out.print(table(loads))
        if results.written:
            out.print(f"results: {results.path}", soft_wrap=True)
    failed = [reason for load in loads for reason in load.summary.errors]
    for reason in sorted(set(failed)):
        out.print(f"failed: {reason}", markup=False, soft_wrap=True)
    return 1 if failed else 0


def _loads(plan: LoadPlan, servers: Sequence[Server], chosen: list[Prompt]) -> Iterator[Load]:
    for server in servers:
        short = msgspec.structs.replace(
            plan.params, max_tokens=min(WARM_UP_TOKENS, plan.params.max_tokens)
        )
        asyncio.run(_drive(server, WARM_UP, chosen, short, plan.seed))
    for repeat in range(plan.repeats):
        for traffic in plan.traffic:
            first = repeat % len(servers)
            for server in [*servers[first:], *servers[:first]]:
                before = server.counters()
                with _progress(f"{server.name}, {traffic}", traffic.requests) as done:
                    samples = asyncio.run(
                        _drive(server, traffic, chosen, plan.params, plan.seed, done)
                    )
                yield Load(
                    server=server.name,
                    traffic=traffic,
                    repeat=repeat,
                    summary=summarise(samples),
                    counters=difference(server.counters(), before),
                    samples=samples if plan.save_samples else [],
                )


async def _drive(
    server: Server,
    traffic: Traffic,
    chosen: list[Prompt],
    params: SamplingParams,
    seed: int,
    done: Callable[[], None] = lambda: None,
) -> list[Sample]:
    async with server.client() as client:
        return await drive(client, traffic, chosen, params, seed, done)


# ---------------------------------------------------------------------------- servers


@contextmanager
def _servers(plan: LoadPlan, chosen: list[Prompt]) -> Iterator[list[Server]]:
    """Those to be loaded, ready."""
    if plan.url:
        yield [
            Server(
                name="server",
                client=lambda: OpenAIClient(plan.url, plan.model, plan.api_key),
                facts={"url": plan.url, "model": plan.model},
            )
        ]
        return
    if not plan.modes:
        try:
            endpoint = find_endpoint(plan.endpoint or None, plan.run or None)
        except NoPipeline as error:
            raise error.for_command_line() from None
        yield [
            Server(
                name="pipeline",
                client=lambda: PipelineClient(endpoint),
                facts={"endpoint": endpoint},
            )
        ]
        return
    from ssd_pipe.fetch import fetch_models

    fetch_models(msgspec.structs.replace(plan.config, mode="ssd"))
    tokenizer = Tokenizer.load(resolve(plan.config.target.model))
    tokens = {prompt.id: prompt.tokens(tokenizer) for prompt in chosen}
    config = _fitting(plan, max(map(len, tokens.values())))
    engines = [
        PipelineEngine(mode, msgspec.structs.replace(config, mode=mode)) for mode in plan.modes
    ]

    def client(engine: PipelineEngine) -> LoadClient:
        return PipelineClient(engine.client.endpoint, lambda prompt: tokens[prompt.id])

    with running(engines):
        yield [
            Server(
                name=engine.name,
                client=partial(client, engine),
                counters=engine.counters,
                facts=msgspec.to_builtins(engine.facts),
            )
            for engine in engines
        ]


def _fitting(plan: LoadPlan, longest: int) -> PipelineConfig:
    """The configuration with room for the longest prompt and its answer, and not much more."""
    config, needed = plan.config, longest + plan.params.max_tokens
    if config.scheduler.max_model_len:
        return config
    models = [config.target.model, config.draft.model]
    limit = min(ModelConfig.from_folder(resolve(model)).max_positions for model in models)
    if needed > limit:
        raise ConfigError("--tokens", f"prompt and answer need {needed} positions, of {limit}")
    scheduler = msgspec.structs.replace(config.scheduler, max_model_len=min(needed + SLACK, limit))
    return msgspec.structs.replace(config, scheduler=scheduler)


# ---------------------------------------------------------------------------- output


def table(loads: Sequence[Load]) -> Table:
    """Modes side by side: medians over the passes, and throughput over plain decoding's of the
    same pass."""
    made = Table(title="load", title_justify="left")
    columns = ["arrivals", "mode", "tok/s", "x AR", "req/s", "TTFT ms", "p99", "TPOT ms", "ITL p99"]
    for i, name in enumerate([*columns, "E2EL ms"]):
        made.add_column(name, justify="left" if i < 2 else "right", no_wrap=i < 2)
    by_key = {(str(x.traffic), x.server, x.repeat): x.summary for x in loads}
    shown = list(dict.fromkeys((str(x.traffic), x.server) for x in loads))
    for i, (traffic, server) in enumerate(shown):
        repeats = [r for t, s, r in by_key if (t, s) == (traffic, server)]
        mine = [by_key[traffic, server, r] for r in repeats]
        plain = [by_key.get((traffic, "ar", r)) for r in repeats]
        over = [
            s.output_throughput / p.output_throughput
            for s, p in zip(mine, plain, strict=True)
            if p is not None and p.output_throughput
        ]

        def middle(pick: Callable[[Summary], float | None], of: list[Summary] = mine) -> Any:
            return median([value for s in of if (value := pick(s)) is not None])

        made.add_row(
            traffic,
            server,
            number(middle(lambda s: s.output_throughput)),
            number(median(over), 3),
            number(middle(lambda s: s.request_throughput), 2),
            number(middle(lambda s: s.ttft.median), 0),
            number(middle(lambda s: s.ttft.p99), 0),
            number(middle(lambda s: s.tpot.median)),
            number(middle(lambda s: s.itl.p99)),
            number(middle(lambda s: s.e2el.median), 0),
            end_section=i + 1 < len(shown) and shown[i + 1][0] != traffic,
        )
    return made


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """A counter on stderr, drawn as requests end."""
    columns = (TextColumn(name), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task(name, total=total)

        def done() -> None:
            progress.advance(task)
            progress.refresh()

        yield done


def _without_key(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for argument in arguments:
        if kept and kept[-1] == "--api-key":
            kept.append("...")
        elif argument.startswith("--api-key="):
            kept.append("--api-key=...")
        else:
            kept.append(argument)
    return kept
