"""``ssd-pipe status``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ssd_pipe.cli.connect import Place, place_options

if TYPE_CHECKING:
    from ipc.messages.client import StatusReply

_HISTOGRAM = re.compile(r"_at_\d+$")


@place_options
def status(place: Place) -> None:
    """Show a running pipeline: its processes, requests and counters."""
    with place.connect() as client:
        print_status(client.status())


def print_status(reply: StatusReply) -> None:
    """Processes, then gauges and counters, as tables; histograms are for /metrics and ``top``."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    draft = f", draft {reply.draft}" if reply.draft else ""
    console.print(f"run {reply.run}: mode {reply.mode}, target {reply.target}{draft}")
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
