"""Rows of sweeps as curves: along one axis, one curve for every way proposals are judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from bench.loaded import SWEEP, Entry, Loaded

RULE_NAMES = {"shared_noise": "shared noise", "rejection": "rejection"}


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a sweep: how it was judged, its settings, its figures."""

    rule: str
    point: dict[str, Any]
    row: dict[str, Any]


def spots(result: Loaded) -> list[Spot]:
    """Rows of SSD. Greedy rows, which all rules share, appear once for each rule."""
    mine = [e for e in result.entries if e.part == SWEEP and e.engine == "ssd"]
    rules = list(dict.fromkeys(_rule(e, result) for e in mine if not _shared(e, mine)))
    made = []
    for entry in mine:
        names = rules if _shared(entry, mine) else [_rule(entry, result)]
        made += [Spot(rule=name, point=entry.point, row=entry.row) for name in names]
    return made


def number(value: Any, k: int) -> float:
    """A value of an axis as a place on it; of branch counts their mean."""
    if isinstance(value, list):
        return sum(value) / (k + 1)
    return float(value)


def curves(
    found: Sequence[Spot], along: str, figure: str, k: int, fixed: dict[str, Any]
) -> Iterator[tuple[str, list[float], list[float]]]:
    """(rule, x, y) of every rule with a figure at two values of the axis or more.

    Args:
        fixed: other axes' values that rows must have.
    """
    for rule in dict.fromkeys(spot.rule for spot in found):
        pairs = [
            (number(spot.point[along], k), spot.row[figure])
            for spot in found
            if spot.rule == rule
            and along in spot.point
            and spot.row.get(figure) is not None
            and all(spot.point.get(name) == value for name, value in fixed.items())
        ]
        if len({x for x, _ in pairs}) > 1:
            yield rule, [x for x, _ in pairs], [y for _, y in pairs]


def values(found: Sequence[Spot], axis: str) -> list[Any]:
    """Values an axis takes, rising; empty if it is none of the sweep's."""
    seen: list[Any] = []
    for spot in found:
        if axis in spot.point and spot.point[axis] not in seen:
            seen.append(spot.point[axis])
    order: Callable[[Any], Any] = lambda v: (isinstance(v, list), v)  # noqa: E731
    return sorted(seen, key=order)


def _shared(entry: Entry, mine: Sequence[Entry]) -> bool:
    """Whether the row stands for all rules: others have a rule, this one needs none."""
    return "rule" not in entry.point and any("rule" in e.point for e in mine)


def _rule(entry: Entry, result: Loaded) -> str:
    rule = str(entry.point.get("rule", result.rule))
    name = RULE_NAMES.get(rule, rule)
    return f"{name}, C = {entry.point['C']:g}" if "C" in entry.point else name
