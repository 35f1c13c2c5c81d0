"""Decode rate of each engine, data set by data set."""

from __future__ import annotations

from collections.abc import Sequence

from bench.loaded import SWEEP, Entry, Loaded
from bench.plots.style import Picture, colour, grid
from bench.rows import TOTAL


def pictures(results: Sequence[Loaded]) -> list[Picture]:
    """One for each frame of each file."""
    made = []
    for number, result in enumerate(results):
        parts = dict.fromkeys(e.part for e in result.entries if e.part != SWEEP)
        for part in parts:
            entries = [e for e in result.entries if e.part == part and e.row.get("tok_s")]
            if entries:
                made.append(_picture(result, part, entries, number))
    return made


def _picture(result: Loaded, part: str, entries: Sequence[Entry], number: int) -> Picture:
    sets = list(dict.fromkeys(e.set for e in entries))
    sets.sort(key=lambda name: name == TOTAL)  # the total comes last
    engines = list(dict.fromkeys(e.engine for e in entries))
    figure, [[panel]] = grid(1, 1, max(5.0, 1.6 + 1.1 * len(sets) * len(engines) / 3), 3.4)
    width = 0.8 / len(engines)
    rates = {(e.set, e.engine): e.row for e in entries}
    for place, engine in enumerate(engines):
        heights = [rates.get((name, engine), {}).get("tok_s") or 0.0 for name in sets]
        at = [i + (place - (len(engines) - 1) / 2) * width for i in range(len(sets))]
        bars = panel.bar(at, heights, width * 0.92, color=colour(place), label=engine)
        panel.bar_label(bars, [f"{h:.0f}" if h else "" for h in heights], fontsize=7)
    panel.set_xticks(range(len(sets)), sets)
    panel.set_ylabel("tokens/s (decode)")
    panel.set_title(f"Speed, {part}", loc="left")
    panel.grid(visible=False, axis="x")
    figure.legend(loc="outside lower center", ncols=min(len(engines), 6))
    return Picture(
        name=f"speed-{number}-{part.replace(' ', '-')}",
        title=f"Speed by data set ({part})",
        figure=figure,
        caption=f"{result.path.name}: decode rate of a request, first piece left out.",
    )
