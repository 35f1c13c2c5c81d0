"""Where clients find a run's ZeroMQ endpoint, and the keys they need for it.

The frontend always listens on a socket in the run directory, for this user's processes on this
machine, and besides on ``run.endpoint`` if there is one.
"""

from __future__ import annotations

import os

from ipc import curve
from ipc.run_files import RunFiles
from ipc.rundir import find_run
from ssd_pipe.config import RunSection
from ssd_pipe.errors import ResourceError

PUBLIC_SOCKET = "public"
MAX_MESSAGE = 8 << 20  # bytes of one message from a client
SERVER_KEY, CLIENT_KEY = "SSD_SERVER_KEY", "SSD_CLIENT_KEY"


class NoPipeline(ResourceError):
    """None is found, or several are and none is named; the text ends with what helps."""

    def __init__(
        self, reason: str, naming: str = "run=, shm_dir= (its run.shm_dir) or endpoint="
    ) -> None:
        """``naming``: the arguments that say which is meant."""
        super().__init__(
            f"no pipeline to talk to: {reason}; start one: ssd-pipe up, or say which: {naming}"
        )
        self.reason = reason

    def for_command_line(self) -> NoPipeline:
        """The same in the command line's words."""
        return NoPipeline(self.reason, "--run, --shm-dir (its run.shm_dir) or --endpoint")


def local_endpoint(run_dir: RunFiles) -> str:
    """The socket in the run directory."""
    return run_dir.endpoint(PUBLIC_SOCKET)


def find_endpoint(endpoint: str | None = None, run: str | None = None, shm_dir: str = "") -> str:
    """Address of a running pipeline.

    In this order: ``endpoint``; the run named ``run``, or the only live one of this user, under
    ``shm_dir``; if neither is given, $SSD_ENDPOINT, else the only live run under /dev/shm.
    Raises NoPipeline if that gives none.
    """
    if endpoint:
        return endpoint
    if not (run or shm_dir) and (from_environment := os.environ.get("SSD_ENDPOINT")):
        return from_environment
    try:
        return local_endpoint(RunFiles(find_run(shm_dir or RunSection().shm_dir, run or "")))
    except ResourceError as error:
        raise NoPipeline(str(error)) from None


def find_keys(endpoint: str, server_key: str = "", client_key: str = "") -> curve.ClientKeys | None:
    """CURVE keys for talking to ``endpoint``: those given, else $SSD_SERVER_KEY, $SSD_CLIENT_KEY.

    None where none are given and none are needed; socket files never need any. See
    ``curve.client_keys``. Raises ResourceError if a key cannot be used or one is missing.
    """
    if endpoint.startswith("ipc:"):
        return None
    server_key = server_key or os.environ.get(SERVER_KEY, "")
    client_key = client_key or os.environ.get(CLIENT_KEY, "")
    if server_key:
        return curve.client_keys(server_key, client_key)
    if client_key or curve.is_exposed(endpoint):
        raise ResourceError(
            f"{endpoint}: the pipeline's public key is needed: ${SERVER_KEY} or server_key "
            "(--server-key)"
        )
    return None
