"""``bench plot RESULT.json... --out DIR``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.loaded import read
from bench.plots import acceptance, batch, misses, report, rules, speed
from bench.plots.style import save

KINDS = (speed, rules, acceptance, misses, batch)
REPORT = "report.html"


def main(arguments: Sequence[str]) -> int:
    """The command; returns 0. Raises ConfigError for files that are no results."""
    parser = argparse.ArgumentParser(
        prog="ssd-pipe bench plot",
        description="Pictures (PNG and SVG) and one HTML page of results files. What a file holds "
        "decides which: speed by data set; acceptance, hit rate and miss rate over the axes of a "
        "sweep; throughput against latency over the batch.",
    )
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="RESULT.json", help="of ssd-pipe bench"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for what is drawn"
    )
    given = parser.parse_args(arguments)
    results = [read(path) for path in given.results]
    pictures = [picture for kind in KINDS for picture in kind.pictures(results)]
    for picture in pictures:
        for path in save(picture, given.out):
            print(path)
    given.out.mkdir(parents=True, exist_ok=True)
    report.write(given.out / REPORT, results, pictures, given.out)
    print(given.out / REPORT)
    return 0
