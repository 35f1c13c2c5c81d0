"""Why a process ended, as it says itself: a line for people, or one for its supervisor."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NamedTuple

from ssd_pipe.members import SUPERVISOR_VARIABLE

_PLAIN = "error: "
PEER = "lost_peer"
"""The field of a structured line that tells last words from the lines of a log."""


class LastWords(NamedTuple):
    """``peer``: name of the process that it missed, empty if it ends for a reason of its own."""

    reason: str
    peer: str = ""

    def say(self) -> None:
        """Write them to stderr: structured where a supervisor reads them, else for people."""
        line = f"{_PLAIN}{self.reason}"
        if os.environ.get(SUPERVISOR_VARIABLE):
            line = json.dumps({"level": "error", "event": self.reason, PEER: self.peer})
        print(line, file=sys.stderr, flush=True)

    @classmethod
    def read(cls, line: str) -> LastWords | None:
        """Those in a line of a process's stderr, None if it holds none."""
        if line.startswith(_PLAIN):
            return cls(line.removeprefix(_PLAIN))
        fields = structured(line)
        if fields is None or PEER not in fields:
            return None
        return cls(str(fields["event"]), str(fields[PEER]))


def structured(line: str) -> dict[str, Any] | None:
    """The fields of a log line in JSON, None for anything else."""
    if not line.startswith("{"):
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and "event" in fields else None
