"""``bench compare A.json B.json``: B over A, row by row, paired by prompt.

The ratio is that of the decode rates over all prompts both have. Its interval is a bootstrap over
prompts: prompts are drawn with replacement, together with what both runs made of them, since the
prompt is what answers of one run have in common.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from bench import tables
from bench.loaded import Entry, read
from ssd_pipe.errors import ConfigError, ResourceError

RESAMPLES = 10_000
LEVEL = 95.0  # per cent of the interval
Totals = dict[tuple[str, str], tuple[float, float]]


class Difference(msgspec.Struct, kw_only=True):
    """One row of both files.

    Attributes:
        row: what is compared.
        prompts: that both have; 0 where a file was kept without its answers, so that only the
            rows' own rates are left.
        a, b: decode rates over those prompts, tokens a second.
        ratio: b over a; ``low`` and ``high`` bound it, None with fewer than two prompts.
        ttft: b over a of the median times to first token.
        hit_a, hit_b: hit rates.
        same_tokens: share of answers that are equal, token for token; None without answers.
    """

    row: str
    prompts: int
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    ttft: float | None
    hit_a: float | None
    hit_b: float | None
    same_tokens: float | None

    @property
    def verdict(self) -> str:
        """What the interval says."""
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return "same"
        return "faster" if self.low > 1 else "slower"


def compare(first: Sequence[Entry], second: Sequence[Entry], seed: int = 0) -> list[Difference]:
    """Rows that both have with prompts in common."""
    by_key = {entry.key: entry for entry in second}
    found = []
    for entry in first:
        other = by_key.get(entry.key)
        made = None if other is None else _difference(entry, other, seed)
        if made is not None:
            found.append(made)
    return found


def bootstrap(
    a: NDArray[np.float64], b: NDArray[np.float64], seed: int
) -> tuple[float, float] | None:
    """Interval of the ratio of rates, b over a.

    Args:
        a, b: [prompts, 2] tokens and seconds of each prompt in the two runs.

    Returns:
        low and high, None for fewer than two prompts.
    """
    if len(a) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(len(a), size=(RESAMPLES, len(a)))
    sum_a, sum_b = a[drawn].sum(axis=1), b[drawn].sum(axis=1)
    ratios = (sum_b[:, 0] / sum_b[:, 1]) / (sum_a[:, 0] / sum_a[:, 1])
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return float(low), float(high)


def _difference(first: Entry, second: Entry, seed: int) -> Difference | None:
    a, b = _totals(first.samples), _totals(second.samples)
    common = [key for key in a if key in b]
    interval = None
    if common:
        mine, theirs = (np.array([side[key] for key in common]) for side in (a, b))
        rate_a, rate_b = (float(side[:, 0].sum() / side[:, 1].sum()) for side in (mine, theirs))
        interval = bootstrap(mine, theirs, seed)
    elif not first.samples or not second.samples:
        rate_a, rate_b = first.row.get("tok_s") or 0.0, second.row.get("tok_s") or 0.0
    else:
        return None  # other prompts
    if not rate_a or not rate_b:
        return None
    return Difference(
        row=first.key,
        prompts=len(common),
        a=rate_a,
        b=rate_b,
        ratio=rate_b / rate_a,
        low=None if interval is None else interval[0],
        high=None if interval is None else interval[1],
        ttft=_ratio(second.row.get("ttft"), first.row.get("ttft")),
        hit_a=first.row.get("hit_rate"),
        hit_b=second.row.get("hit_rate"),
        same_tokens=_same(first.samples, second.samples),
    )


def _totals(samples: Sequence[dict[str, Any]]) -> Totals:
    """Decoded tokens and their seconds by prompt, over repeats; what has no rate is left out."""
    totals: Totals = {}
    for sample in samples:
        arrivals = sample["arrivals"]
        if len(arrivals) < 2:
            continue
        key = (sample.get("set", ""), sample["prompt"])
        tokens, seconds = totals.get(key, (0.0, 0.0))
        tokens += sum(count for _, count in arrivals[1:])
        totals[key] = (tokens, seconds + arrivals[-1][0] - arrivals[0][0])
    return {key: each for key, each in totals.items() if each[1] > 0}


def _same(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> float | None:
    def keyed(samples: Sequence[dict[str, Any]]) -> dict[Any, list[int]]:
        return {(s.get("set", ""), s["prompt"], s["repeat"]): s["tokens"] for s in samples}

    a, b = keyed(first), keyed(second)
    both = [key for key in a if key in b]
    return sum(a[key] == b[key] for key in both) / len(both) if both else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def main(arguments: Sequence[str]) -> int:
    """The command; returns 0. Raises ConfigError if the files have no row in common."""
    parser = argparse.ArgumentParser(
        prog="ssd-pipe bench compare",
        description="B over A, paired by prompt, with bootstrap intervals (95 %).",
    )
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the same as JSON")
    given = parser.parse_args(arguments)
    found = compare(read(given.a).entries, read(given.b).entries, given.seed)
    if not found:
        raise ConfigError(str(given.b), f"has no row in common with {given.a}")
    out = Console(width=None if sys.stdout.isatty() else 180)
    out.print(tables.difference_table(found))
    if given.output is not None:
        rows = [{**msgspec.to_builtins(d), "verdict": d.verdict} for d in found]
        try:
            given.output.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
        except OSError as error:
            raise ResourceError(f"{given.output}: {error.strerror}") from None
    return 0
