"""How a pipeline's figures look on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ipc.messages.client import StatusReply
from ipc.messages.hub import ProcessState
from ssd_pipe.live.figures import STAGES, Figures, Look, between, kv_usage, since_start

SILENT = 3.0  # seconds without a heartbeat that are worth a colour
STALE = 2.0  # seconds since the scheduler told its counters, likewise
STATE_STYLES = {"ready": "green", "starting": "yellow", "stopping": "yellow", "dead": "bold red"}
BAR = 24  # columns


def render(before: Look | None, now: Look) -> RenderableType:
    """One view: what is, what happened since the look ``before``, and since the start."""
    reply = now.reply
    recent = between(before, now) if before is not None else None
    whole = since_start(now)
    parts: list[RenderableType] = [_heading(reply), Text(), _requests(reply), Text()]
    parts += [_rates(recent, whole), Text()]
    if whole.step_ms:
        parts += [_stages(recent, whole), Text()]
    parts.append(_processes(reply.processes))
    return Group(*parts)


def _heading(reply: StatusReply) -> Text:
    draft = f", draft {reply.draft}" if reply.draft else ""
    text = Text(f"run {reply.run}  mode {reply.mode}  target {reply.target}{draft}", "bold")
    if reply.age < 0:
        text.append("  the scheduler has not told anything yet", "yellow")
    elif reply.age > STALE:
        text.append(f"  as of {reply.age:.0f} s ago", "bold red")
    return text


def _requests(reply: StatusReply) -> RenderableType:
    counters = reply.counters
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        "requests",
        Text.assemble(
            (f"{reply.running}", "bold"), " running  ", (f"{reply.waiting}", "bold"), " waiting  ",
            f"{counters.get('finished_requests', 0):.0f} finished  ",
            f"{counters.get('preemptions', 0):.0f} preempted",
        ),
    )  # fmt: skip
    usage = kv_usage(reply)
    if usage is not None:
        total = counters["total_blocks"]
        used = f"{usage:4.0%} of {total:.0f} blocks"
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=1, completed=usage, width=BAR), used)
        grid.add_row("KV", bar)
    return grid


def _rates(recent: Figures | None, whole: Figures) -> Table:
    span = f"last {recent.seconds:.1f} s" if recent and recent.seconds else "now"
    table = _table("", span, "since start")
    for name, attribute, form in (
        ("output tok/s", "output_rate", ".1f"),
        ("prompt tok/s", "prompt_rate", ".1f"),
        ("tokens a round", "tokens_a_round", ".2f"),
        ("accepted length", "accepted", ".2f"),
        ("cache hit rate", "hit_rate", ".2f"),
        ("prefix-cache hits", "prefix_rate", ".0%"),
    ):
        values = (getattr(recent, attribute, None), getattr(whole, attribute))
        if values != (None, None) or attribute == "output_rate":
            table.add_row(name, *(_number(value, form) for value in values))
    return table


def _stages(recent: Figures | None, whole: Figures) -> Table:
    table = _table("ms a step", "now", "since start")
    for name, _ in STAGES:
        now = recent.step_ms.get(name) if recent else None
        if whole.step_ms[name]:
            table.add_row(name, _number(now, ".2f"), _number(whole.step_ms[name], ".2f"))
    return table


def _processes(processes: tuple[ProcessState, ...]) -> Table:
    table = Table("process", box=None, pad_edge=False)
    for heading in ("pid", "silent s"):
        table.add_column(heading, justify="right")
    table.add_column("state")
    table.add_column("")
    for process in processes:
        silent = process.silent > SILENT and process.state == "ready"
        detail = process.detail or (f"HTTP on port {process.port}" if process.port else "")
        table.add_row(
            process.name,
            str(process.pid),
            Text(f"{process.silent:.1f}", "bold red" if silent else ""),
            Text(process.state, STATE_STYLES.get(process.state, "")),
            detail,
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(headings[0], box=None, pad_edge=False)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", min_width=11)
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
