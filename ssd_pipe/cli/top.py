"""``ssd-pipe top``: a running pipeline, looked at every now and then."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ssd_pipe.cli.connect import Place, place_options

if TYPE_CHECKING:
    from rich.console import Console

    from ssd_pipe.client import Client
    from ssd_pipe.live.figures import Look

PATIENCE = 10.0  # seconds without an answer after which the pipeline counts as gone
TERMINATED_STATUS = 143


@place_options
def top(
    place: Place,
    interval: Annotated[
        float, typer.Option("--interval", "-d", min=0.1, max=3600, help="seconds between looks")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="one view, over one interval")] = False,
) -> None:
    """Watch a running pipeline: speed, acceptance, hits, memory, processes; Ctrl-C ends it.

    Where the output is no terminal, views are printed one after the other.
    """
    from rich.console import Console

    from ssd_pipe.live.view import render

    console = Console(highlight=False)
    with place.connect(PATIENCE) as client:
        looks = _looks(client, interval)
        try:
            before = next(looks)
            if once:
                console.print(render(before, next(looks)))
            elif console.is_terminal:
                _watch(console, before, looks)
            else:
                for now in looks:
                    console.print(render(before, now))
                    console.print()
                    before = now
        except KeyboardInterrupt:
            return


def _watch(console: Console, before: Look, looks: Iterator[Look]) -> None:
    from rich.live import Live

    from ssd_pipe.live.view import render

    # So that the terminal is put back as it was.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED_STATUS))
    first = render(None, before)
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        for now in looks:
            live.update(render(before, now), refresh=True)
            before = now


def _looks(client: Client, interval: float) -> Iterator[Look]:
    """A look now and one every ``interval`` seconds. Raises PeerLost when there is no answer."""
    from ssd_pipe.live.figures import Look

    due = time.monotonic()
    while True:
        yield Look.at(client.status(), time.monotonic())
        due = max(due + interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
