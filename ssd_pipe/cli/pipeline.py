"""``ssd-pipe up``, ``serve``, ``run`` and ``demo``: the commands that start processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssd_pipe.cli.options import ConfigSource, config_options
from ssd_pipe.cli.statuses import INTERRUPTED_STATUS
from ssd_pipe.config import PipelineConfig
from ssd_pipe.config_load import load
from ssd_pipe.errors import ConfigError, PeerLost

if TYPE_CHECKING:
    from ssd_pipe.supervisor import Supervisor

DEMO_PROMPT = "Why does the sky look blue during the day and red at sunset? Explain it simply."
Pull = Annotated[
    bool, typer.Option("--pull/--no-pull", help="fetch a model that is not on this machine")
]


class Role(StrEnum):
    """Processes that `run` starts."""

    FRONTEND = "frontend"
    SCHEDULER = "scheduler"
    TARGET = "target"
    DRAFT = "draft"
    GATEWAY = "gateway"


ReadyFile = Annotated[
    Path | None, typer.Option("--ready-file", help="JSON written here when the pipeline is ready")
]


@config_options
def up(source: ConfigSource, ready_file: ReadyFile = None, pull: Pull = True) -> int:
    """Start all processes of a pipeline and watch them; Ctrl-C ends them."""
    return _supervise(source.load(), ready_file, pull)


@config_options
def serve(
    source: ConfigSource,
    model: Annotated[
        str,
        typer.Argument(
            help="target model: folder, hub id or built-in name; none = as configured",
            show_default=False,
        ),
    ] = "",
    ready_file: ReadyFile = None,
    pull: Pull = True,
) -> int:
    """Serve a model by OpenAI-compatible HTTP: `up --http --target MODEL`; Ctrl-C ends it."""
    if model and "target.model" in source.overrides:
        raise ConfigError("--target", "MODEL names the target already")
    given = {"gateway.enabled": True} | ({"target.model": model} if model else {})
    return _supervise(load(source.path, source.overrides | given), ready_file, pull)


def _supervise(config: PipelineConfig, ready_file: Path | None, pull: bool) -> int:
    from ssd_pipe.fetch import fetch_models
    from ssd_pipe.supervisor import Supervisor

    if pull:
        fetch_models(config)
    supervisor = Supervisor(config, ready_file=ready_file)
    with signals_stop(supervisor):
        supervisor.start()
        while not supervisor.wait(1.0):
            pass
    if supervisor.failure:
        raise PeerLost(supervisor.failure)
    return 0


@config_options
def run(
    source: ConfigSource,
    role: Annotated[Role, typer.Argument(help="which process")],
    rank: Annotated[
        int, typer.Option("--rank", min=0, help="rank of a target, number of a draft")
    ] = 0,
) -> int:
    """Start one process of a run in the foreground; the first one makes the run.

    All processes of a run are told the same: a run with a gateway needs --http everywhere. The
    Procfile does that when SSD_HTTP=1 is in the environment.
    """
    from ssd_pipe.cli.single import run_single

    return run_single(source, role.value, rank)


@config_options
def demo(
    source: ConfigSource,
    prompt: Annotated[str, typer.Argument(help="what to ask")] = DEMO_PROMPT,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="of the answer")] = 160,
    pull: Pull = True,
) -> int:
    """Start a pipeline, stream one answer to the terminal, print its numbers, shut down."""
    from rich.console import Console

    from ssd_pipe.cli.talk import print_metrics, show
    from ssd_pipe.client import Client
    from ssd_pipe.fetch import fetch_models
    from ssd_pipe.params import SamplingParams
    from ssd_pipe.relay import Relay
    from ssd_pipe.supervisor import Supervisor

    config = source.load()
    notes = Console(stderr=True, highlight=False)
    if pull:
        fetch_models(config)
    supervisor = Supervisor(config, sink=Relay("warning"))
    with signals_stop(supervisor):
        supervisor.start()
        notes.print(f"starting run {supervisor.config.run.name} ({config.mode}) ...", style="dim")
        try:
            if not supervisor.wait_ready():
                return INTERRUPTED_STATUS
            notes.print(f"> {prompt}", style="bold")
            with Client(supervisor.endpoint) as client:
                params = SamplingParams(max_tokens=max_tokens)
                finish, numbers = show(client.chat(prompt, params))
        except Exception:
            # A request that broke off because a process died: that process is the news.
            if supervisor.stop():
                raise PeerLost(supervisor.failure) from None
            raise
        finally:
            supervisor.stop("the demo is over")
        if numbers is not None:
            print_metrics(numbers, finish)
        notes.print(f"logs: {supervisor.log_dir}", style="dim")
    if supervisor.failure:
        raise PeerLost(supervisor.failure)
    return INTERRUPTED_STATUS if finish == "cancelled" else 0


@contextmanager
def signals_stop(supervisor: Supervisor) -> Iterator[None]:
    """While inside, INT, TERM and HUP end the group in order; a second one kills it."""

    def handle(number: int, frame: object) -> None:
        supervisor.request_stop(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        supervisor.stop()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
