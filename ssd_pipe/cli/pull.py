"""``ssd-pipe pull``."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    names: Annotated[
        list[str] | None, typer.Argument(help="built-in name or hub id; none = the default pair")
    ] = None,
) -> None:
    """Fetch models and convert them; prints where each one is."""
    from ssd_pipe import hub

    for name in names or hub.BUILT_IN:
        with hub.terminal_progress() as progress:
            folder = hub.pull(name, progress)
        print(f"{name}  {folder}")
