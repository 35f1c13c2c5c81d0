"""Output of supervised processes, re-emitted as structured lines that name the process.

The processes write JSON lines when they are not on a terminal; whatever else they print (a
library's warning, a traceback) becomes the event of a line of its own.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

import structlog

from ssd_pipe.last_words import PEER, structured
from ssd_pipe.log_file import LogFile
from ssd_pipe.logs import LEVELS

SILENT = 100  # above every level
PLAIN_LEVEL = {"stdout": "info", "stderr": "warning"}


class Sink(Protocol):
    """Where the supervisor's own events and its children's lines go."""

    def event(self, level: str, event: str, **facts: Any) -> None:
        """One event of the supervisor."""

    def line(self, process: str, stream: str, line: str) -> None:
        """One line a child wrote."""

    def open_file(self, path: Path, limit: int = 0) -> None:
        """From now on also keep what no child keeps in its own log file; see ``LogFile``."""

    def close(self) -> None:
        """Close that file."""


class Relay:
    """Writes structured lines to ``stream``: pretty on a terminal, JSON otherwise.

    Safe to use from several threads. ``level`` is the lowest level written to the stream.
    """

    def __init__(self, level: str = "info", stream: TextIO | None = None) -> None:
        self._lowest = LEVELS[level]
        self._stream = stream if stream is not None else sys.stderr
        self._file: LogFile | None = None
        self._lock = threading.Lock()
        self._console: structlog.dev.ConsoleRenderer | None = None
        if self._stream.isatty():
            self._console = structlog.dev.ConsoleRenderer(
                colors="NO_COLOR" not in os.environ, pad_event_to=24
            )

    def open_file(self, path: Path, limit: int = 0) -> None:
        """Raises ResourceError if it cannot be opened."""
        self._file = LogFile(path, limit)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def event(self, level: str, event: str, **facts: Any) -> None:
        self._write({**_stamp("supervisor"), "level": level, "event": event, **facts}, keep=True)

    def line(self, process: str, stream: str, line: str) -> None:
        fields = structured(line)
        if fields is not None:
            last = PEER in fields  # a process may end before it has a log file
            if last and not fields[PEER]:
                del fields[PEER]
            self._write({**_stamp(process), **fields, "proc": process}, keep=last)
            return
        level = "error" if line.startswith("error: ") else PLAIN_LEVEL[stream]
        facts = {"level": level, "event": line, "stream": stream}
        self._write({**_stamp(process), **facts}, keep=True)

    def _write(self, fields: dict[str, Any], keep: bool) -> None:
        level = str(fields.get("level", "info"))
        text = json.dumps(fields, default=str)
        with self._lock:
            if keep and self._file is not None:
                self._file.write(f"{text}\n".encode())
            if LEVELS.get(level, SILENT - 1) < self._lowest:
                return
            if self._console is not None:
                text = self._pretty(self._console, level, fields)
            try:
                print(text, file=self._stream, flush=True)
            except (OSError, ValueError):
                self._lowest = SILENT  # nobody reads any more

    @staticmethod
    def _pretty(console: structlog.dev.ConsoleRenderer, level: str, fields: dict[str, Any]) -> str:
        shown = {k: v for k, v in fields.items() if k not in ("t", "wall", "proc", "stream")}
        wall = str(fields.get("wall", ""))[11:23]
        return str(console(None, level, {"timestamp": wall, "logger": fields["proc"], **shown}))


def _stamp(process: str) -> dict[str, Any]:
    """As every log line of this project begins; see ``logs``."""
    now = time.time_ns()
    wall = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 1_000_000_000))
    micros = now % 1_000_000_000 // 1000
    return {"t": time.monotonic_ns(), "wall": f"{wall}.{micros:06d}Z", "proc": process}
