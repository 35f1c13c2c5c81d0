"""How every picture looks, and how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ssd_pipe.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000")
"""Okabe and Ito's, which everyone can tell apart."""
MARKERS = "osD^vPX*"
DPI = 150
RC: dict[Any, Any] = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "font.size": 9.0,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "ssd-pipe",
}


class Picture(msgspec.Struct, kw_only=True):
    """A figure, its file name without ending, and what the report says below it."""

    name: str
    title: str
    figure: Any
    caption: str = ""


def grid(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    """A figure of ``rows`` x ``columns`` panels, each so many inches wide and high.

    Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "bench plot", "matplotlib is not installed here: pip install 'ssd-pipe[plots]'"
        ) from None
    mpl.rcParams.update(RC)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in panels]


def colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def line(panel: Axes, place: int, x: Sequence[float], y: Sequence[float], label: str) -> None:
    """One series, sorted by x."""
    pairs = sorted(zip(x, y, strict=True))
    panel.plot(
        [p[0] for p in pairs],
        [p[1] for p in pairs],
        color=colour(place),
        marker=MARKERS[place % len(MARKERS)],
        markersize=4,
        linewidth=1.4,
        label=label,
    )


def save(picture: Picture, folder: Path) -> list[Path]:
    """Write PNG and SVG. Raises ResourceError."""
    made = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for ending in ("png", "svg"):
            path = folder / f"{picture.name}.{ending}"
            metadata = {"Date": None} if ending == "svg" else None
            picture.figure.savefig(path, dpi=DPI, metadata=metadata)
            made.append(path)
    except OSError as error:
        raise ResourceError(f"{folder}: {error.strerror}") from None
    return made
