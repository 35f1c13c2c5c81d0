"""Finding a running pipeline for the commands that talk to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssd_pipe.client import Client


def connect(run: str, endpoint: str) -> Client:
    """A client of the pipeline that ``--run`` or ``--endpoint`` names, or of the only one.

    Raises ResourceError if there is none.
    """
    from ssd_pipe.client import Client

    return Client(endpoint or None, run or None)
