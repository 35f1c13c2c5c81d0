"""``ssd-pipe keys``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def keys(
    name: Annotated[Path, typer.Argument(help="what to call the pair, with or without a folder")],
) -> None:
    """Make a CURVE key pair, NAME.key (public) and NAME.key_secret, for a server or a client.

    A server's secret one is run.curve_secret_key, its public one goes to clients (SSD_SERVER_KEY).
    A client's secret one is SSD_CLIENT_KEY, its public one goes to the folder run.curve_clients.
    """
    from ipc.curve import make_pair

    public, secret = make_pair(name.expanduser())
    print(f"public  {public}\nsecret  {secret}")
