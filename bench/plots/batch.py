"""Throughput against latency: one curve an engine, one point a batch size."""

from __future__ import annotations

from collections.abc import Sequence

from bench.loaded import SWEEP, Entry, Loaded
from bench.plots.style import Picture, colour, grid, line


def pictures(results: Sequence[Loaded]) -> list[Picture]:
    """One for each sweep over the batch."""
    made = []
    for place, result in enumerate(results):
        entries = [
            e
            for e in result.entries
            if e.part == SWEEP
            and "batch" in e.point
            and e.row.get("throughput")
            and e.row.get("itl_p50")
        ]
        if len({e.point["batch"] for e in entries}) > 1:
            made.append(_picture(result, entries, place))
    return made


def _picture(result: Loaded, entries: Sequence[Entry], place: int) -> Picture:
    figure, [[panel]] = grid(1, 1, 5.6, 3.8)
    for i, name in enumerate(dict.fromkeys(map(_curve, entries))):
        mine = [e for e in entries if _curve(e) == name]
        x = [1e3 / e.row["itl_p50"] for e in mine]
        y = [e.row["throughput"] for e in mine]
        line(panel, i, x, y, name)
        for entry, at_x, at_y in zip(mine, x, y, strict=True):
            panel.annotate(
                str(entry.point["batch"]),
                (at_x, at_y),
                xytext=(4, 4),
                textcoords="offset points",
                color=colour(i),
                fontsize=7,
            )
    panel.set_xlabel("tokens/s of one request (1 / median time a token)")
    panel.set_ylabel("tokens/s of all requests")
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.set_title("Throughput against latency, by batch", loc="left")
    figure.legend(loc="outside lower center", ncols=3)
    return Picture(
        name=f"batch-{place}",
        title="Throughput against latency over the batch",
        figure=figure,
        caption=f"{result.path.name}: numbers at points are requests under way at a time.",
    )


def _curve(entry: Entry) -> str:
    rest = {k: v for k, v in entry.point.items() if k != "batch"}
    return " ".join([entry.engine, *(f"{k}={v}" for k, v in rest.items())])
