"""A picture of some rounds: a lane per process, draft work under the verification it overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ssd_pipe.errors import ConfigError, ResourceError
from ssd_pipe.trace.reading import SCHEDULER
from ssd_pipe.trace.timeline import DraftRound, Round, TimeLine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
COLOURS = {
    "forward": "#4c72b0",
    "judging": "#9db7dd",
    "hit": "#2f9e44",
    "miss": "#e03131",
    "wait for depth": "#c9c9c9",
    "wait for backup": "#ffb0a0",
    "backup": "#e8590c",
    "glue": "#7048a8",
    "depth": "#b197d6",
    "depth (even)": "#d3c4ea",
}
LEGEND = {
    "forward": "verification: forward",
    "judging": "verification: judging",
    "glue": "glue pass, fork",
    "depth": "tree step (one depth)",
    "backup": "backup",
    "wait for depth": "wait for depth",
    "wait for backup": "wait for backup",
    "hit": "outcome: hit",
    "miss": "outcome: miss",
}
MARKERS = {"hit": "o", "miss": "X"}
SLIM = {"fontsize": 7.5, "handlelength": 1.2, "columnspacing": 1.2, "frameon": False}
HALF = 0.36  # of a lane's height, that bars take


def draw(path: Path, line: TimeLine, rounds: Sequence[Round]) -> None:
    """Write a picture of ``rounds``, in the format that the name's ending says.

    Raises ConfigError for another format, ResourceError if matplotlib is missing or the file
    cannot be written.
    """
    if path.suffix not in FORMATS:
        raise ConfigError("--picture", f"{path.name}: must end in {', '.join(FORMATS)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ResourceError("a picture needs matplotlib: pip install 'ssd-pipe[plots]'") from None
    lanes = _lanes(line, rounds)
    with rc_context({"svg.fonttype": "none", "font.size": 8, "svg.hashsalt": "ssd-pipe"}):
        figure = Figure(figsize=(12, 1.3 + 0.75 * len(lanes)), layout="constrained")
        axes = figure.add_subplot()
        _Picture(axes, lanes, rounds).draw()
        axes.set_title(
            f"{line.name}: {line.mode}, rounds {rounds[0].step} to {rounds[-1].step}", loc="left"
        )
        try:
            figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else {})
        except OSError as error:
            raise ResourceError(f"{path}: {error.strerror}") from None


def _lanes(line: TimeLine, rounds: Sequence[Round]) -> list[str]:
    """Processes with something to show: targets, the scheduler, drafts."""
    busy = {v.process for r in rounds for v in r.verifications}
    drafting = {d.process for r in rounds for d in r.drafts}
    targets = [name for name in line.processes if name in busy]
    scheduler = [name for name in line.processes if name == SCHEDULER]
    return [*targets, *scheduler, *(name for name in line.processes if name in drafting)]


class _Picture:
    def __init__(self, axes: Axes, lanes: list[str], rounds: Sequence[Round]) -> None:
        self._axes = axes
        self._rounds = rounds
        self._at = {name: -i for i, name in enumerate(lanes)}
        self._begin = min(t for r in rounds[:1] for t in (r.sent, r.start) if t)
        self._used: set[str] = set()

    def draw(self) -> None:
        previous: Round | None = None
        for each in self._rounds:
            self._verifications(each)
            self._scheduler(previous, each)
            for draft in each.drafts:
                self._draft(draft)
            previous = each
        self._frame()

    def _verifications(self, this: Round) -> None:
        for done in this.verifications:
            split = done.forward or done.end
            self._bar(done.process, "forward", done.start, split)
            self._bar(done.process, "judging", split, done.end)
            # What the draft does under this shade costs nothing.
            self._axes.axvspan(
                self._ms(done.start), self._ms(done.end), color="#4c72b0", alpha=0.07, lw=0
            )
            self._text(done.process, (done.start + split) // 2, f"{done.step}", "white")

    def _scheduler(self, previous: Round | None, this: Round) -> None:
        if SCHEDULER not in self._at:
            return
        if this.waited:
            self._bar(SCHEDULER, "wait for depth", this.query, this.waited)
        if previous is not None and previous.query and this.sent and this.backups:
            begin = previous.waited or previous.query
            self._bar(SCHEDULER, "wait for backup", begin, this.sent)
        level = self._at[SCHEDULER]
        for place, outcome in enumerate(this.outcomes):
            if outcome.hit is None:
                continue
            kind = "hit" if outcome.hit else "miss"
            self._used.add(kind)
            offset = 0.28 * (place % 3 - (min(len(this.outcomes), 3) - 1) / 2)
            self._axes.plot(
                self._ms(this.query or this.end),
                level + offset,
                MARKERS[kind],
                color=COLOURS[kind],
                markersize=6,
                zorder=4,
            )
        if len(this.outcomes) == 1:
            (only,) = this.outcomes
            self._axes.annotate(
                f"+{only.k + 1}",
                (self._ms(this.query or this.end), level),
                xytext=(-5, 0),
                textcoords="offset points",
                va="center",
                ha="right",
            )

    def _draft(self, draft: DraftRound) -> None:
        for stage, start, end in draft.passes():
            kind, _, depth = stage.partition(" ")
            kind = "depth (even)" if depth and int(depth) % 2 == 0 else kind
            self._bar(draft.process, kind, start, end)
        level = self._at[draft.process]
        middle = (draft.start + draft.end) // 2
        self._text(draft.process, middle, f"{draft.number}", "black")
        if draft.cut:
            cut = self._ms(draft.end)
            self._axes.plot([cut, cut], [level - HALF, level + HALF], color="#e03131", lw=1.5)

    def _bar(self, process: str, kind: str, start: int, end: int) -> None:
        if end <= start:
            return
        self._used.add("depth" if kind.startswith("depth") else kind)
        self._axes.broken_barh(
            [(self._ms(start), (end - start) * 1e-6)],
            (self._at[process] - HALF, 2 * HALF),
            facecolor=COLOURS[kind],
            edgecolor="white",
            linewidth=0.4,
            hatch="///" if kind.startswith("wait") else None,
        )

    def _text(self, process: str, time: int, text: str, colour: str) -> None:
        self._axes.text(
            self._ms(time), self._at[process], text, color=colour, ha="center", va="center"
        )

    def _frame(self) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        axes = self._axes
        axes.set_yticks(list(self._at.values()), list(self._at))
        axes.set_ylim(min(self._at.values()) - 0.5, 0.5)
        # Draft work for outcomes of the last round goes on after it.
        ends = [d.end for r in self._rounds for d in r.drafts]
        last = max([*ends, *(max(r.end, r.query, r.waited) for r in self._rounds)])
        axes.set_xlim(0, self._ms(last) * 1.005)
        axes.set_xlabel("milliseconds")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        handles = [
            Line2D([], [], color=COLOURS[kind], marker=MARKERS[kind], lw=0, label=label)
            if kind in MARKERS
            else Patch(facecolor=COLOURS[kind], label=label)
            for kind, label in LEGEND.items()
            if kind in self._used
        ]
        figure = axes.get_figure(root=True)
        if figure is not None:
            figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), **SLIM)

    def _ms(self, time: int) -> float:
        return (time - self._begin) * 1e-6
