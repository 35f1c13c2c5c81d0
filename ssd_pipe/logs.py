"""Logs: JSON lines to a file per process, readable lines on a terminal.

Every line has ``t`` (CLOCK_MONOTONIC in ns, the same clock in all processes of a machine), ``wall``
(UTC), ``proc``, ``level`` and ``event``. The "verify" lines of a target (by ``step``) and the
"draft" lines of the draft (by ``round``) also carry stage times on that clock, so that a time line
can be put together across processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from ssd_pipe.log_file import LogFile

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
KEPT_RUNS = 100
_UNNAMED = re.compile(r"(run|llm-\d+)-[0-9a-f]{8}")
_STDERR_LEVEL = {"warning", "error", "critical", "exception"}


class _Sink:
    """The only processor: stamps the event and writes it where it belongs."""

    def __init__(self, process: str, file: LogFile | None, pretty: bool) -> None:
        self._process = process
        self._file = file
        self._pretty = pretty
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._console = structlog.dev.ConsoleRenderer(
            colors="NO_COLOR" not in os.environ, pad_event_to=24
        )
        self._second = -1
        self._second_text = ""

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        now = time.time_ns()
        level = "error" if method == "exception" else method
        to_stderr = not event.pop("file_only", False) and (self._pretty or method in _STDERR_LEVEL)
        if event.get("exc_info"):
            event = structlog.processors.format_exc_info(logger, method, event)
        stamped = {
            "t": time.monotonic_ns(),
            "wall": self._wall(now),
            "proc": self._process,
            "level": level,
            **event,
        }
        if self._file is not None or (to_stderr and not self._pretty):
            line = self._encoder.encode(stamped) + b"\n"
            if self._file is not None:
                self._file.write(line)
            if to_stderr and not self._pretty:
                _to_stderr(line)
        if to_stderr and self._pretty:
            shown = {"timestamp": stamped["wall"][11:23], "level": level, "logger": self._process}
            text = self._console(logger, method, {**shown, **event})
            _to_stderr(f"{text}\n".encode())
        raise structlog.DropEvent  # written; nothing is left for structlog to do

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _wall(self, now: int) -> str:
        second, rest = divmod(now, 1_000_000_000)
        if second != self._second:
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second
        return f"{self._second_text}.{rest // 1000:06d}Z"


class _FromLibraries(logging.Handler):
    """Records of the standard logging module, from libraries, as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger()
        write = log.error if record.levelno >= logging.ERROR else log.warning
        write(record.getMessage(), logger_name=record.name, exc_info=record.exc_info)


_open_sinks: list[_Sink] = []


def configure(
    process: str,
    log_file: Path | None,
    level: str = "info",
    pretty: bool | None = None,
    limit: int = 0,
) -> FilteringBoundLogger:
    """Set up logging of this process and return its logger.

    Args:
        process: name on every line, for instance "target-0".
        log_file: JSON lines are appended here; folders are made. None writes no file.
        level: lowest level written: debug, info, warning or error.
        pretty: everything to stderr, readable; False: only warnings and errors, as JSON;
            None: readable if stderr is a terminal.
        limit: bytes of the file before a new one begins (see ``log_file``); 0 = no limit.

    Raises:
        ResourceError: the file cannot be opened.
    """
    file = LogFile(log_file, limit) if log_file is not None else None
    close()
    sink = _Sink(process, file, sys.stderr.isatty() if pretty is None else pretty)
    _open_sinks.append(sink)
    structlog.configure(
        processors=[sink],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_FromLibraries(logging.WARNING)]
    logging.captureWarnings(True)
    log: FilteringBoundLogger = structlog.get_logger().bind()
    return log


def close() -> None:
    """Close the log file; later lines reach stderr only."""
    while _open_sinks:
        _open_sinks.pop().close()


def log_folder(log_dir: str, run: str) -> Path:
    """Folder of one run's logs: under ``log_dir``, or the user's state folder if it is empty."""
    if log_dir:
        return Path(log_dir).expanduser() / run
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "ssd-pipe" / "logs" / run


def expire(parent: Path, live: Collection[str], keep: int = KEPT_RUNS) -> None:
    """Remove the logs of unnamed runs but the latest ``keep``; those of ``live`` runs stay."""
    with contextlib.suppress(OSError):
        folders = [f for f in parent.iterdir() if _UNNAMED.fullmatch(f.name) and f.is_dir()]
        folders.sort(key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
        for folder in folders[keep:]:
            if folder.name not in live:
                shutil.rmtree(folder, ignore_errors=True)


def _plain(value: Any) -> Any:
    """What JSON lacks: NumPy scalars and arrays as numbers and lists, the rest as text."""
    plain = getattr(value, "tolist", None)
    return plain() if plain is not None else str(value)


def _to_stderr(line: bytes) -> None:
    # A reader that left must not take the process down with it.
    with contextlib.suppress(OSError):
        os.write(2, line)
