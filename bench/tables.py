"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from bench.bandwidth import Bandwidth
from bench.exactness import Report
from bench.fan_out import Cell
from bench.rows import Row

if TYPE_CHECKING:
    from bench.comparison import Difference

NONE = "-"


def number(value: float | None, digits: int = 1) -> str:
    """Fixed digits; a dash for None."""
    return NONE if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """.67"""
    return NONE if value is None else f"{value:.2f}".removeprefix("0")


def speed_table(title: str, rows: Sequence[Row], by_set: bool = False) -> Table:
    """How fast each engine is; ``by_set`` names each row's prompt set."""
    first = ["set", "engine"] if by_set else ["engine"]
    table = _table(title, [*first, "tok/s", "x AR", "x SD", "TTFT ms", "ms/tok p50", "p99"])
    for name in ("tok/round", "round ms", "MB/tok", "GB/s", "of copy", "of read", "same tokens"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *([row.set] if by_set else []),
            row.engine,
            number(row.tok_s, 2),
            number(row.speedup.get("ar"), 2),
            number(row.speedup.get("sd"), 2),
            number(row.ttft, 0),
            number(row.itl_p50),
            number(row.itl_p99),
            number(row.tokens_per_round, 2),
            number(row.round_time),
            number(row.mb_per_token, 0),
            number(row.gb_s, 2),
            share(row.copy_share),
            share(row.read_share),
            share(row.same_tokens),
        )
    return table


def speculation_table(rows: Sequence[Row]) -> Table | None:
    """What speculation does in each engine that says so; None if there is none."""
    counted = [row for row in rows if row.counters or row.accepted_mean is not None]
    if not counted:
        return None
    table = _table(
        "", ["engine", "accepted", "by position", "hit rate", "after hit", "after miss", "by k"]
    )
    for name in ("draft ms/round", "hidden", "exposed", "overhead ms", "median", "head+judge ms"):
        table.add_column(name, justify="right")
    for row in counted:
        table.add_row(
            row.engine,
            number(row.accepted_mean, 2),
            " ".join(map(share, row.acceptance)) or NONE,
            share(row.hit_rate),
            share(row.hit_after_hit),
            share(row.hit_after_miss),
            " ".join(map(share, row.hit_rate_by_k)) or NONE,
            number(row.draft_busy),
            number(row.draft_hidden),
            number(row.draft_exposed),
            number(row.overhead, 2),
            number(row.overhead_median, 2),
            number(row.judge, 2),
        )
    return table


SHORT = {"temperature": "T", "fan_out": "F"}


def sweep_table(axes: Sequence[str], rows: Sequence[Row]) -> Table:
    """A row for each measured combination; a dash where an axis is none of an engine's."""
    batched = any(row.batch > 1 for row in rows)
    columns = ["engine", *(SHORT.get(axis, axis) for axis in axes), "tok/s"]
    table = _table("sweep", [*columns, *(["all tok/s"] if batched else []), "x AR", "x SD"])
    for name in ("TTFT ms", "ms/tok p50", "p99", "tok/round", "accept", "hit rate", "hidden"):
        table.add_column(name, justify="right")
    for name in ("exposed", "MB/tok", "same tokens"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.engine,
            *(setting(row.point.get(axis)) for axis in axes),
            number(row.tok_s, 2),
            *([number(row.throughput, 2)] if batched else []),
            number(row.speedup.get("ar"), 2),
            number(row.speedup.get("sd"), 2),
            number(row.ttft, 0),
            number(row.itl_p50),
            number(row.itl_p99),
            number(row.tokens_per_round, 2),
            share(row.accepted_share),
            share(row.hit_rate),
            number(row.draft_hidden),
            number(row.draft_exposed),
            number(row.mb_per_token, 0),
            share(row.same_tokens),
        )
    return table


def setting(value: object) -> str:
    """A value of an axis; a dash for None."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return NONE if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def bandwidth_line(bandwidth: Bandwidth) -> str:
    """One line about the measured bandwidths."""
    threads = f"{bandwidth.threads} thread{'s' if bandwidth.threads > 1 else ''}"
    return (
        f"bandwidth with {threads}: copy {bandwidth.copy * 1e-9:.1f} GB/s (read + written), "
        f"read {bandwidth.read * 1e-9:.1f} GB/s"
    )


def fan_out_table(cells: Sequence[Cell]) -> Table:
    """Cells grouped by rule, temperature and budget."""
    table = _table("fan-out", ["rule", "T", "B", "allocation", "rounds", "hit rate", "design"])
    for name in ("by k", "accepted", "tok/round"):
        table.add_column(name, justify="right")
    ordered = sorted(cells, key=lambda c: (c.rule != "shared_noise", c.temperature, c.branches))
    for i, cell in enumerate(ordered):
        group = (cell.rule, cell.temperature, cell.branches)
        following = ordered[i + 1 : i + 2]
        table.add_row(
            cell.rule,
            f"{cell.temperature:g}",
            str(cell.branches),
            cell.allocation,
            str(cell.rounds),
            share(cell.hit_rate),
            share(cell.expected),
            " ".join(map(share, cell.hit_rate_by_k)),
            number(cell.accepted_mean, 2),
            number(cell.tokens_per_round, 2),
            end_section=any((c.rule, c.temperature, c.branches) != group for c in following),
        )
    return table


def exactness_tables(report: Report) -> list[Table]:
    """Every check, then every difference."""
    checks = _table("exactness", ["check", "mode", "batch", "prompts", "tokens", "equal"])
    for c in report.checks:
        checks.add_row(c.check, c.mode, str(c.batch), str(c.prompts), str(c.tokens), str(c.equal))
    if not report.differences:
        return [checks]
    columns = ["check", "mode", "batch", "prompt", "position", "expected", "got", "top-2 gap"]
    found = _table("differences", columns)
    for d in report.differences:
        gap = NONE if d.gap is None else f"{d.gap:.2e}"
        place = [d.check, d.mode, str(d.batch), d.prompt, str(d.position)]
        found.add_row(*place, str(d.expected), str(d.got), gap)
    return [checks, found]


def difference_table(found: Sequence[Difference]) -> Table:
    """Two runs, row by row."""
    table = _table("B over A", ["row", "prompts", "A tok/s", "B tok/s", "B / A", "95 % interval"])
    for name in ("", "TTFT B / A", "hit rate A", "B", "same tokens"):
        table.add_column(name, justify="right")
    for d in found:
        interval = NONE if d.low is None else f"{d.low:.3f} .. {d.high:.3f}"
        table.add_row(
            d.row,
            str(d.prompts),
            number(d.a, 2),
            number(d.b, 2),
            number(d.ratio, 3),
            interval,
            d.verdict,
            number(d.ttft, 2),
            share(d.hit_a),
            share(d.hit_b),
            share(d.same_tokens),
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title or None, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0)
    return table
