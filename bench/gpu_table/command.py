"""``python -m bench.gpu_table``: run the parts, print the table."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.copy_bandwidth import measured_apart
from bench.gpu_table.parts import PARTS
from bench.gpu_table.rows import ROWS, Line, judge
from bench.gpu_table.run import Content, choose, measure, missing, opened
from bench.results import write
from ssd_pipe.config_load import parse_set
from ssd_pipe.errors import ConfigError, ResourceError

WIDTH = 400  # columns where no terminal says: no row of the table is broken


def main(given: Sequence[str]) -> int:
    """Returns 0 once everything asked for is measured, whether it meets its goal or not, and 1 if a
    part or a row failed.

    Raises ConfigError, and ResourceError with what this machine lacks.
    """
    args = _arguments(given)
    out = plain_console()
    if args.list:
        out.print(_plan())
        return 0
    left_out = choose(PARTS, ROWS, args.only, args.skip_large)
    content = opened(args.output) if args.resume else Content()
    asked = [part.with_settings(args.set) for part in PARTS if part.name not in left_out]
    wanted = [part for part in asked if not content.has(part)]

    def save() -> None:
        content.lines = judge(ROWS, content.parts, left_out)
        # As the parts name them: asking here would leave this process on a GPU that they fill.
        content.heading["gpus"] = max((o.gpus for o in content.parts.values()), key=len, default=[])
        write(args.output, content)

    if wanted:
        if lack := missing(max(part.gpus for part in wanted)):
            raise ResourceError(lack)
        write(args.output, content, keep=False)
        begun = time.monotonic()
        content.heading = {
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            **machine.describe(["python", "-m", "bench.gpu_table", *given]),
        }
        bandwidth = measured_apart("cuda")
        out.print(f"a copy on one GPU moves {bandwidth * 1e-12:.2f} TB/s, read plus written")
        seconds = begun + args.minutes * 60 - time.monotonic() if args.minutes else None
        left_out |= measure(
            wanted, content.parts, args.log_dir, bandwidth, seconds, out.print, save
        )
    save()
    out.print(table(content.lines))
    for text in _origins(content):
        out.print(text, soft_wrap=True)
    out.print(f"results: {args.output}; what the parts printed: {args.log_dir}", soft_wrap=True)
    return content.status


def table(lines: Sequence[Line]) -> Table:
    """As Markdown, a line per row."""
    made = Table(box=box.MARKDOWN)
    for name in ("row", "what", "measured", "goal", "state", "made of"):
        made.add_column(name, overflow="fold")
    for line in lines:
        measured = line.text or line.state
        state = line.state if line.goal and line.text else ""
        made.add_row(line.row, line.what, measured, line.goal, state, line.note)
    return made


def plain_console(file: IO[str] | None = None) -> Console:
    """Takes brackets and colons as they are."""
    width = None if file is None and sys.stdout.isatty() else WIDTH
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False)


def _origins(content: Content) -> Iterator[str]:
    """Where each part's numbers come from, a line each."""
    for name, outcome in content.parts.items():
        where = ", ".join(outcome.gpus) or "no GPU named"
        told = f"{name}: {outcome.started}, {outcome.seconds:.0f} s, {where}"
        yield f"{told}: {' '.join(outcome.command)}"
        if outcome.failure:
            yield f"{name}: FAILED, {outcome.failure}"


def _plan() -> Table:
    made = Table(box=box.MARKDOWN)
    for name in ("part", "about", "GPUs", "rows", "command"):
        made.add_column(name, overflow="fold")
    for part in PARTS:
        rows = " ".join(row.name for row in ROWS if row.part == part.name)
        command = " ".join(("python", *part.command))
        made.add_row(part.name, f"{part.seconds:g} s", str(part.gpus), rows, command)
    made.add_row("in all", f"{sum(part.seconds for part in PARTS):g} s", "", "", "")
    return made


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_table",
        description="Measures everything that has a goal on two GPUs and prints one table. With "
        "--minutes and --resume it can be had in several calls.",
        epilog="ssd-pipe bench gpu-table is the same.",
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="rows, or parts with all their rows")
    add("--skip-large", action="store_true", help="without the 32B and 70B shapes")
    add("--minutes", type=float, default=0.0, help="begin no part that would take longer [no end]")
    add("--resume", action="store_true", help="keep those parts of --output that ended well")
    add(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting of the pipelines, repeatable",
    )
    add("--list", action="store_true", help="print parts, usual times, rows and commands; run none")
    folder = Path(gettempdir()) / "ssd-gpu-table"
    add("--log-dir", type=Path, default=folder, help=f"what the parts print [{folder}]")
    results = Path("bench/results/gpu-table.json")
    add("--output", type=Path, default=results, help=f"results file (JSON) [{results}]")
    args = parser.parse_args(given)
    if args.minutes < 0:
        raise ConfigError("--minutes", f"must be at least 0, got {args.minutes:g}")
    for text in args.set:
        parse_set(text)
    return args
