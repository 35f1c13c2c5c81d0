"""``ssd-pipe status``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ssd_pipe.cli.connect import Place, place_options

if TYPE_CHECKING:
    from ipc.messages.client import StatusReply

_HISTOGRAM = re.compile(r"_at_\d+$")


@place_options
def status(
    place: Place,
    as_json: Annotated[bool, typer.Option("--json", help="all there is to know, as JSON")] = False,
) -> None:
    """Show a running pipeline: its processes, requests and counters."""
    from ssd_pipe.runs import starting_run, state_of

    with place.connect() as client:
        if name := starting_run(client.endpoint):
            told = {"run": name, "state": "starting"}
            print(_json(told) if as_json else f"run {name}: starting")
            return
        reply = client.status()
    if as_json:
        told = msgspec.to_builtins(reply)
        hidden = ("type", "id")  # of the message
        known = {name: value for name, value in told.items() if name not in hidden}
        print(_json({"run": reply.run, "state": state_of(reply), **known}))
    else:
        print_status(reply)


def _json(told: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(told)).decode()


def print_status(reply: StatusReply) -> None:
    """Processes, then gauges and counters, as tables; histograms are for /metrics and ``top``."""
    from rich.console import Console
    from rich.table import Table

    from ssd_pipe.runs import state_of

    console = Console(highlight=False)
    draft = f", draft {reply.draft}" if reply.draft else ""
    console.print(
        f"run {reply.run}: {state_of(reply)}, mode {reply.mode}, target {reply.target}{draft}"
    )
    console.print(
        f"{reply.running} running, {reply.waiting} waiting, "
        f"at most {reply.max_model_len} tokens a request"
    )
    if reply.degraded:
        console.print(f"degraded: {reply.degraded}", style="yellow")
    if reply.synthetic:
        console.print(f"SYNTHETIC ACCEPTANCE {reply.synthetic}: text and rates are no model's")
    table = Table("process", "pid", "state", "detail", box=None)
    for process in reply.processes:
        detail = process.detail or (f"HTTP on port {process.port}" if process.port else "")
        notes = [f"{name}: {note}" for name, note in process.notes.items()]
        table.add_row(
            process.name, str(process.pid), process.state, "; ".join(filter(None, [detail, *notes]))
        )
    console.print(table)
    for name, value in sorted(reply.counters.items()):
        if _HISTOGRAM.search(name):
            continue
        console.print(f"  {name} {value:g}")
