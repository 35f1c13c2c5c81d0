"""Hit rate and acceptance along temperature, fan-out and C, whichever a sweep varied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.loaded import Loaded
from bench.plots.series import Spot, curves, spots, values
from bench.plots.style import Picture, grid, line
from bench.tables import SHORT

AXES = {"temperature": "temperature", "fan_out": "fan-out F", "C": "Saguaro's C"}
FIGURES = {"hit_rate": "hit rate", "accepted_share": "acceptance a token"}


def pictures(results: Sequence[Loaded]) -> list[Picture]:
    """One for each axis a file has."""
    made = []
    for place, result in enumerate(results):
        found = spots(result)
        for axis, label in AXES.items():
            if len(values(found, axis)) > 1:
                made.append(_picture(result, found, axis, label, place))
    return made


def _picture(result: Loaded, found: Sequence[Spot], axis: str, label: str, place: int) -> Picture:
    others = _fixed(found, axis)
    figure, panels = grid(len(FIGURES), max(1, len(others)), 3.1, 2.5)
    for row, (name, text) in zip(panels, FIGURES.items(), strict=True):
        for panel, fixed in zip(row, others, strict=True):
            for i, (rule, x, y) in enumerate(curves(found, axis, name, result.k, fixed)):
                line(panel, i, x, y, rule)
            panel.set_xlabel(label)
            panel.set_ylabel(text)
            panel.set_ylim(0, 1)
            panel.set_title(", ".join(f"{SHORT[k]} = {v}" for k, v in fixed.items()), loc="left")
    handles, labels = panels[0][0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return Picture(
        name=f"acceptance-{place}-{axis}",
        title=f"Hit rate and acceptance by {label}",
        figure=figure,
        caption=f"{result.path.name}: ssd, k = {result.k}, allocation {result.allocation}.",
    )


def _fixed(found: Sequence[Spot], axis: str) -> list[dict[str, Any]]:
    """What the panels of a picture hold fast: the other axis of the two that matter most."""
    other = "fan_out" if axis == "temperature" else "temperature"
    rows = values([spot for spot in found if axis in spot.point], other)
    return [{other: value} for value in rows] or [{}]
