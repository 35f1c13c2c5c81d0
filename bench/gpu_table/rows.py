"""Which figure is judged by what: the numbers that two H200s are to reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from bench.gpu_table import figures
from bench.gpu_table.figures import Figure, Missing
from bench.gpu_table.parts import Outcome

State = Literal["met", "missed", "measured", "failed", "not run"]
SYNTHETIC = "synthetic acceptance"


class Goal(msgspec.Struct, frozen=True):
    """What a value is to be: at least, at most, or more than ``limit``."""

    relation: Literal[">=", "<=", ">"]
    limit: float

    def met(self, value: float) -> bool:
        """Whether it is. NaN meets nothing."""
        if self.relation == "<=":
            return value <= self.limit
        return value > self.limit if self.relation == ">" else value >= self.limit

    def __str__(self) -> str:
        return f"{self.relation} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One line of the table. ``read`` raises Missing; ``digits`` are those printed."""

    name: str
    what: str
    part: str
    read: Callable[[Outcome], Figure]
    goal: Goal | None = None
    unit: str = ""
    digits: int = 2


class Line(msgspec.Struct, kw_only=True):
    """A row as it came out. ``note``: what the value is made of, or why there is none."""

    row: str
    what: str
    part: str
    value: float | None = None
    text: str = ""
    goal: str = ""
    state: State
    note: str = ""


def _shapes(
    name: str, part: str, pair: str, over_sd: Goal | None, over_ar: Goal | None
) -> list[Row]:
    published = "" if part == "llama8b" else part
    return [
        Row(
            f"{name}-theorem7",
            f"SSD over what Theorem 7 allows, {pair}, {SYNTHETIC}",
            part,
            figures.theorem7,
            Goal(">=", 0.95),
        ),
        Row(
            f"{name}-over-sd",
            f"SSD over SD, {pair}, {SYNTHETIC}",
            part,
            figures.over("sd", published=published),
            over_sd,
        ),
        Row(
            f"{name}-over-ar",
            f"SSD over AR, {pair}, {SYNTHETIC}",
            part,
            figures.over("ar", published=published),
            over_ar,
        ),
    ]


def _real(name: str, temperature: str) -> list[Row]:
    return [
        Row(
            f"{name}-over-{other}",
            f"SSD over {other.upper()}, SmolLM2-135M / 16M, {temperature}",
            "smollm2",
            figures.over(other, temperature),
            Goal(">", 1.0),
        )
        for other in ("sd", "ar")
    ]


ROWS = (
    Row(
        "ar-8b-step",
        "AR, Llama-3.1-8B shape: weights a step reads over the copy bandwidth",
        "steps",
        figures.step_share("llama-3.1-8b"),
        Goal(">=", 0.8),
    ),
    Row(
        "ar-8b",
        "the same through the whole pipeline",
        "llama8b",
        figures.pipeline_share,
        Goal(">=", 0.8),
    ),
    Row("ar-135m", "AR, SmolLM2-135M", "smollm2", figures.rate("ar"), Goal(">=", 1200), "tok/s", 0),
    Row(
        "verify-8",
        "verification of 8 tokens over decoding 1, Llama-3.1-8B shape",
        "steps",
        figures.verification("llama-3.1-8b"),
        Goal("<=", 1.08),
        digits=3,
    ),
    Row(
        "tree-1b",
        "tree step of 24 branches over an AR step, Llama-3.2-1B shape",
        "steps",
        figures.tree_step("llama-3.2-1b", 24),
        Goal("<=", 1.15),
        digits=3,
    ),
    Row(
        "hit-leased",
        "a round on a hit beyond its verification, the host out of the loop",
        "smollm2",
        figures.leased_hit,
        Goal("<=", 25),
        "us",
        1,
    ),
    Row(
        "hit-scheduler",
        "the same through the scheduler",
        "host",
        figures.scheduled_hit,
        Goal("<=", 150),
        "us",
        0,
    ),
    *_shapes("8b", "llama8b", "Llama-3.1-8B / 1B", Goal(">=", 1.5), None),
    *_shapes("32b", "qwen32b", "Qwen3-32B / 0.6B", None, None),
    *_shapes("70b", "llama70b", "Llama-3.1-70B / 1B", None, Goal(">=", 5)),
    *_real("real", "T=0"),
    *_real("real-t1", "T=1"),
    Row(
        "draft-tree",
        "the draft's 5 tree steps of 12 to 24 branches with sampling, 16M",
        "steps",
        figures.tree_ms("smollm2-draft-16m", (12, 24)),
        Goal("<=", 0.8),
        "ms",
        3,
    ),
    Row(
        "hf",
        "transformers generate, SmolLM2-135M",
        "transformers",
        figures.rate("hf", ("ar", "ssd")),
        unit="tok/s",
        digits=1,
    ),
    Row(
        "hf-assisted",
        "transformers assisted generation, SmolLM2-135M / 16M",
        "transformers",
        figures.rate("hf-assisted", ("ar", "ssd")),
        unit="tok/s",
        digits=1,
    ),
)


def judge(
    rows: Sequence[Row], outcomes: Mapping[str, Outcome], left_out: Mapping[str, str]
) -> list[Line]:
    """Every row, by what the parts left; ``left_out`` says why a part has not been run."""
    return [_line(row, outcomes.get(row.part), left_out.get(row.part, "")) for row in rows]


def _line(row: Row, outcome: Outcome | None, why_not: str) -> Line:
    goal = str(row.goal) if row.goal else ""
    line = Line(
        row=row.name, what=row.what, part=row.part, goal=goal, state="not run", note=why_not
    )
    if outcome is None:
        return line
    try:
        figure = row.read(outcome)
    except Missing as missing:
        line.state = "failed"
        line.note = f"{missing}; {outcome.failure}" if outcome.failure else str(missing)
        return line
    line.value, line.note = figure.value, figure.note
    line.text = f"{figure.value:.{row.digits}f} {row.unit}".rstrip()
    line.state = "measured"
    if row.goal:
        line.state = "met" if row.goal.met(figure.value) else "missed"
    return line
