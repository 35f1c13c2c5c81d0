"""``ssd-pipe ps`` and ``ssd-pipe down``: the pipelines that run here."""

from __future__ import annotations

import datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ssd_pipe.config import RunSection
from ssd_pipe.errors import ConfigError

if TYPE_CHECKING:
    from ssd_pipe.runs import Pipeline

HEADINGS = ("NAME", "STATE", "MODE", "TARGET", "DRAFT", "PID", "SINCE", "REQUESTS", "URL")

ShmDir = Annotated[str, typer.Option("--shm-dir", help="their run.shm_dir, if not /dev/shm")]


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="all there is to know, as JSON")] = False,
    shm_dir: ShmDir = "",
) -> None:
    """List your running pipelines. PID is the supervisor's; REQUESTS are running+waiting."""
    from ssd_pipe.runs import list_pipelines

    found = list_pipelines(shm_dir or RunSection().shm_dir)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    # Never folded, as people cut and grep such lists.
    rows = [(*HEADINGS, "ENDPOINT"), *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def down(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="runs; none = the only one that is no program's own",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="all, but those that programs have for themselves"),
    ] = False,
    shm_dir: ShmDir = "",
) -> None:
    """End running pipelines in order, as Ctrl-C where they run would; returns when they are gone.

    Requests under way are told that the pipeline is stopping.
    """
    from ssd_pipe.runs import choose_runs, end_runs

    if names and every:
        raise ConfigError("--all", "names every run, and others are named besides")
    place = shm_dir or RunSection().shm_dir
    chosen = choose_runs(place, names or [], every)
    for name in end_runs(place, chosen):
        print(f"{name} stopped")
    if not chosen:
        print("no pipeline is running")


def _row(run: Pipeline) -> tuple[str, ...]:
    since = datetime.datetime.fromtimestamp(run.since).isoformat(" ", "seconds")
    answering = run.state not in ("starting", "no answer")
    return (
        run.name,
        run.state,
        run.mode or "-",
        _short(run.target),
        _short(run.draft),
        str(run.pid or "-"),
        since,
        f"{run.running}+{run.waiting}" if answering else "-",
        run.url or "-",
        run.endpoint,
    )


def _short(model: str) -> str:
    """A hub id or built-in name as it is, a folder by its name."""
    return (PurePath(model).name if model.startswith(("/", ".", "~")) else model) or "-"
