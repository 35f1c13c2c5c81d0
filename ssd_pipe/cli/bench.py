"""``ssd-pipe bench``: hands everything after it to the benchmark's own command line."""

from __future__ import annotations

import typer

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench(context: typer.Context) -> int:
    """Measure; the arguments are those of ``python -m bench`` (try ``bench --help``)."""
    from bench.__main__ import main

    return main(context.args) or 0
