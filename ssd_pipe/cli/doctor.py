"""``ssd-pipe doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ssd_pipe.cli.options import only_one
from ssd_pipe.config_load import load


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    config: Annotated[
        list[Path] | None, typer.Option("--config", metavar="FILE", help="TOML file to look for")
    ] = None,
) -> None:
    """Say what this machine has for a pipeline, and what is missing."""
    from rich.console import Console

    from ssd_pipe.doctor import examine, render

    report = examine(load(only_one("--config", config or []), {}))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        render(report, Console())
