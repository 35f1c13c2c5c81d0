"""Where a run's public ZeroMQ endpoint is, for the frontend that binds it and for clients."""

from __future__ import annotations

import os

import msgspec

from ipc.rundir import RunDir, find_run
from ssd_pipe.config import PipelineConfig, RunSection
from ssd_pipe.errors import ResourceError

PUBLIC_SOCKET = "public"
MAX_MESSAGE = 8 << 20  # bytes of one message from a client


def public_endpoint(run: RunSection, run_dir: RunDir) -> str:
    """The configured address, or the socket in the run directory."""
    return run.endpoint or run_dir.endpoint(PUBLIC_SOCKET)


def find_endpoint(endpoint: str | None = None, run: str | None = None, shm_dir: str = "") -> str:
    """Public address of a running pipeline.

    In this order: ``endpoint``; the run named ``run``; $SSD_ENDPOINT; the only live run of this
    user under ``shm_dir`` (default /dev/shm). Raises ResourceError if that gives none.
    """
    if endpoint:
        return endpoint
    if not run and (from_environment := os.environ.get("SSD_ENDPOINT")):
        return from_environment
    try:
        path = find_run(shm_dir or RunSection().shm_dir, run or "")
    except ResourceError as error:
        raise ResourceError(
            f"no pipeline to talk to: {error}; start one: ssd-pipe up, or say where it is: "
            "--shm-dir (its run.shm_dir) or --endpoint"
        ) from None
    try:
        config = msgspec.json.decode((path / "config.json").read_bytes(), type=PipelineConfig)
    except OSError:
        return f"ipc://{path / f'{PUBLIC_SOCKET}.sock'}"  # nobody has written it yet
    except msgspec.MsgspecError as error:
        raise ResourceError(f"{path / 'config.json'}: not readable: {error}") from None
    return config.run.endpoint or f"ipc://{path / f'{PUBLIC_SOCKET}.sock'}"
