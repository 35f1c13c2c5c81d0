"""What a sweep varies: the command line's axes, and which engine each of them is of any matter to.

An engine that an axis does not touch is measured once along it, and its one row is the baseline of
all others: AR knows no k, SD no fan-out, and at temperature 0 all rules do the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bench.build import TRANSFORMERS
from bench.servers import launch
from ssd_pipe.config import PipelineConfig
from ssd_pipe.config_load import parse_value, setting_names
from ssd_pipe.errors import ConfigError

TEMPERATURE, BATCH, RULE, C, FAN_OUT = "temperature", "batch", "rule", "C", "fan_out"
SETTINGS = {
    "k": "speculation.k",
    FAN_OUT: "speculation.fan_out",
    "fan_out_miss": "speculation.fan_out_miss",
    "allocation": "speculation.allocation",
    C: "speculation.saguaro_c",
    RULE: "speculation.rule",
    "backup": "speculation.backup",
    "tp": "target.tp",
}
OF_REQUESTS = (TEMPERATURE, BATCH)
ALIASES = {setting: name for name, setting in SETTINGS.items()} | {"c": C, "saguaro_c": C}
OF_SD = ("k", RULE)
OF_ALL = ("tp", *OF_REQUESTS)
Point = dict[str, Any]


class Axis(msgspec.Struct, frozen=True):
    """``name`` is one of SETTINGS or OF_REQUESTS, or any setting (``section.key``)."""

    name: str
    values: tuple[Any, ...]


def parse(text: str) -> Axis:
    """``k=1,2,4``; a list is one value in brackets: ``fan_out=2,[4,3,2,2,1,6]``.

    Raises ConfigError.
    """
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    name = ALIASES.get(name, name)
    if not equals or not values.strip():
        raise ConfigError("--sweep", f"must look like name=value,value, got {text!r}")
    if name not in (*SETTINGS, *OF_REQUESTS) and not _sweepable(name):
        known = ", ".join((*SETTINGS, *OF_REQUESTS))
        raise ConfigError("--sweep", f"{name!r} is none of: {known}, nor a setting")
    found: list[Any] = [parse_value(f"--sweep {name}", part) for part in _split(values)]
    if name in (TEMPERATURE, C):
        found = [_float(name, value) for value in found]
    if name == BATCH and any(not isinstance(v, int) or v < 1 for v in found):
        raise ConfigError("--sweep batch", "numbers from 1 on")
    return Axis(name, tuple(found))


def points(axes: Sequence[Axis]) -> Iterator[Point]:
    """Every combination, the last axis fastest."""
    names = [axis.name for axis in axes]
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip(names, values, strict=True))


def relevant(engine: str, point: Mapping[str, Any], config: PipelineConfig, greedy: bool) -> Point:
    """What of ``point`` makes a difference to ``engine``.

    Args:
        config: what the sweep starts from; says the rule where no axis does.
        greedy: whether the temperature is 0 where no axis says it.
    """
    kept = {name: value for name, value in point.items() if _touches(engine, name)}
    if not kept.get(TEMPERATURE, 0.0 if greedy else 1.0):
        kept.pop(RULE, None)
        kept.pop(C, None)
    elif kept.get(RULE, config.speculation.rule) != "rejection":
        kept.pop(C, None)
    return kept


def key(engine: str, point: Mapping[str, Any]) -> str:
    """Names a row: two with one key are the same measurement."""
    return " ".join([engine, *(f"{name}={_plain(value)}" for name, value in point.items())])


def check(axes: Sequence[Axis], engines: Sequence[str], config: PipelineConfig) -> None:
    """Raises ConfigError for axes that cannot be swept with these engines."""
    by_name = {axis.name: axis for axis in axes}
    if len(by_name) != len(axes):
        raise ConfigError("--sweep", "names one axis twice")
    rules = by_name[RULE].values if RULE in by_name else (config.speculation.rule,)
    if C in by_name and "rejection" not in rules:
        raise ConfigError("--sweep C", "needs the rejection rule: --rule rejection, or rule= too")
    single = [name for name in engines if name in TRANSFORMERS]
    if BATCH in by_name and max(by_name[BATCH].values) > 1 and single:
        raise ConfigError("--sweep batch", f"{single[0]} answers one request at a time")


def _touches(engine: str, axis: str) -> bool:
    if engine in TRANSFORMERS:
        return axis in OF_REQUESTS
    if axis in OF_ALL:
        return True
    if engine in (*launch.VLLM, *launch.SGLANG):
        return axis == "k" and engine.endswith("-sd")
    mode = engine.partition("-")[0]
    if mode == "ar":
        return axis.startswith(("target.", "cache.", "scheduler."))
    if mode == "sd":
        return axis in OF_SD or (axis not in SETTINGS and not axis.startswith("speculation."))
    return True


def _sweepable(name: str) -> bool:
    return name in setting_names() and name != "mode" and not name.startswith(("run.", "gateway."))


def _split(text: str) -> list[str]:
    """At the commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"--sweep {name}", f"not a number: {value!r}") from None


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
