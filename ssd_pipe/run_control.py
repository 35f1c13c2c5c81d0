"""What a supervisor and those who look for it or want it to end say to each other.

Both are files in the run directory, which only this user reaches. A request to stop is a file, not
a signal: no process number can be mistaken, and a supervisor inside somebody's program ends its
pipeline rather than that program.
"""

from __future__ import annotations

import os

import msgspec

from ipc.run_files import RunFiles
from ssd_pipe.ready_file import write_atomically

STOP_REASON = "ssd-pipe down"


class SupervisorFacts(msgspec.Struct, frozen=True):
    """``pid``: of the process that the supervisor runs in."""

    pid: int


def announce(run: RunFiles) -> None:
    """Say that this process supervises the run. Raises OSError."""
    write_atomically(run.supervisor, msgspec.json.encode(SupervisorFacts(os.getpid())))


def supervisor_pid(run: RunFiles) -> int:
    """0 for a run without a supervisor: its processes were started one by one."""
    try:
        return msgspec.json.decode(run.supervisor.read_bytes(), type=SupervisorFacts).pid
    except (OSError, msgspec.MsgspecError):
        return 0


def request_stop(run: RunFiles) -> None:
    """Ask the run's supervisor for an orderly end; it looks several times a second.

    Raises OSError, FileNotFoundError if the run has just gone.
    """
    run.stop_request.touch()


def stop_requested(run: RunFiles) -> bool:
    """Whether somebody has."""
    return run.stop_request.exists()
