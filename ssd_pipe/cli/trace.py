"""``ssd-pipe trace``: what the logs of a run say, as a table, a trace file and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

if TYPE_CHECKING:
    from ssd_pipe.trace.stages import Summary


def trace(
    run: Annotated[
        str, typer.Argument(help="name of a run, or its log folder; none = the latest run")
    ] = "",
    log_dir: Annotated[str, typer.Option("--log-dir", help="the run's run.log_dir")] = "",
    chrome: Annotated[
        Path | None,
        typer.Option("--chrome", metavar="FILE", help="write a trace for ui.perfetto.dev"),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="draw some rounds: .png, .svg or .pdf"),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="how many to draw")] = 10,
    first: Annotated[
        int | None,
        typer.Option("--from", help="step to draw from; none = rounds that are like the run"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the table as JSON")] = False,
) -> None:
    """Put a run's logs together: where the time of its rounds went."""
    from ssd_pipe.trace.reading import find_logs, read_logs
    from ssd_pipe.trace.stages import summarise
    from ssd_pipe.trace.timeline import join

    folder = find_logs(run, log_dir)
    line = join(read_logs(folder))
    summary = summarise(line)
    if chrome is not None:
        from ssd_pipe.trace.chrome import write_chrome
        from ssd_pipe.trace.kernels import read_kernels

        write_chrome(chrome, line, read_kernels(folder, line))
    if picture is not None:
        from ssd_pipe.trace.picture import draw
        from ssd_pipe.trace.window import choose_rounds

        draw(picture, line, choose_rounds(line, rounds, first))
    # After the files: whoever reads this may leave before its end.
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(summary)).decode())
    else:
        print_summary(summary, folder)


def print_summary(summary: Summary, folder: Path) -> None:
    """A line on the run, and the table of stages."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    facts = [f"run {summary.run}: mode {summary.mode}", f"{summary.rounds} rounds"]
    for value, form in (
        (summary.round_ms, "{:.2f} ms each"),
        (summary.tokens_a_round, "{:.2f} tokens a round"),
        (summary.hit_rate, "hit rate {:.2f}"),
        (summary.hidden, "{:.0%} of the draft's work under a verification"),
    ):
        if value is not None:
            facts.append(form.format(value))
    console.print(", ".join(facts), soft_wrap=True)
    if not summary.rounds:
        console.print(f"no two decoding rounds in a row in {folder}", soft_wrap=True)
    else:
        table = Table(box=None, pad_edge=False)
        table.add_column("stage")
        for heading in ("times", "p50 ms", "p99 ms", "max ms", "of a round"):
            table.add_column(heading, justify="right")
        beside = False
        for stage in summary.stages:
            if stage.beside and not beside:
                beside = True
                table.add_section()
                table.add_row("beside it, in the draft:", style="dim")
            table.add_row(
                f"{'  ' if stage.part_of else ''}{stage.name}",
                str(stage.count),
                *(f"{value:.3f}" for value in (stage.p50, stage.p99, stage.max)),
                f"{stage.share:.1%}",
            )
        console.print(table)
    if summary.unreadable:
        console.print(f"{summary.unreadable} unreadable lines left out", style="dim")
