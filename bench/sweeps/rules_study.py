"""The question that a preset answers: how should proposals be judged?

Shared noise against rejection sampling (Saguaro's C at 1 and below) at temperatures and fan-outs:
acceptance, hit rate, tokens a round, tokens a second.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.sweeps.axes import Axis

AXES = (
    Axis("rule", ("shared_noise", "rejection")),
    Axis("C", (1.0, 0.5)),
    Axis("temperature", (0.0, 0.3, 0.7, 1.0)),
    Axis("fan_out", (1, 2, 3, 4, 8)),
)
SETS = ("humaneval-style", "builtin-questions", "builtin-maths")
SIZE = {"prompts": 2, "tokens": 96, "repeats": 1}
"""Of each set; about ten minutes on two quiet cores."""


def axes(given: Sequence[Axis]) -> list[Axis]:
    """The study's axes; those that are given take the place of the ones of their name."""
    replaced = {axis.name: axis for axis in given}
    own = [replaced.pop(axis.name, axis) for axis in AXES]
    return [*own, *replaced.values()]
