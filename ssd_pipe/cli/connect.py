"""Finding a running pipeline for the commands that talk to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssd_pipe.client import Client


def connect(run: str, endpoint: str, shm_dir: str = "", timeout: float = 30.0) -> Client:
    """A client of the pipeline that ``--run`` or ``--endpoint`` names, or of the only one.

    Runs are looked for under ``shm_dir``, empty for the default. ``timeout`` is the client's.

    Raises ResourceError if there is none.
    """
    from ssd_pipe.client import Client

    return Client(endpoint or None, run or None, timeout, shm_dir)
