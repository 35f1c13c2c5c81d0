"""Finds the logs of a run and reads them, whatever state its processes left them in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ssd_pipe.errors import ResourceError
from ssd_pipe.log_file import ROTATED, process_of
from ssd_pipe.logs import log_folder

Event = dict[str, Any]
"""One line of a log: ``t``, ``proc``, ``event`` and the event's own fields."""

SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True)
class RunLogs:
    """What the processes of one run wrote.

    Attributes:
        folder: where it was read.
        events: by process name, in the order written.
        unreadable: lines left out: torn by a crash, or no log lines at all.
    """

    folder: Path
    events: dict[str, list[Event]]
    unreadable: int

    @property
    def name(self) -> str:
        """The run's name, as its processes knew it."""
        for events in self.events.values():
            for event in events[:1]:
                if isinstance(event.get("run"), str):
                    return str(event["run"])
        return self.folder.name


def find_logs(run: str = "", log_dir: str = "") -> Path:
    """Folder of a run's logs.

    Args:
        run: a folder, the name of a run, or empty for the run that wrote last.
        log_dir: the run's ``run.log_dir``; empty for the user's state folder.

    Raises ResourceError if there is none.
    """
    if not run:
        return _newest(log_folder(log_dir, ""))
    folder = Path(run) if _files(Path(run)) else log_folder(log_dir, run)
    if not _files(folder):
        raise ResourceError(f"{folder}: no logs of a run")
    return folder


def read_logs(folder: Path) -> RunLogs:
    """Read the logs in ``folder``.

    Of several runs that wrote into the same files the latest counts. Raises ResourceError if a
    file cannot be read or none holds a line.
    """
    events: dict[str, list[Event]] = {}
    unreadable = 0
    for path in _files(folder):
        lines, bad = _read(path)
        unreadable += bad
        if lines:
            events.setdefault(process_of(path), []).extend(lines)
    events = {name: _since_last_start(lines) for name, lines in events.items()}
    began = events[SCHEDULER][0]["t"] if SCHEDULER in events else 0
    # A process that this run does not have may have been part of an earlier one.
    events = {name: lines for name, lines in events.items() if lines[-1]["t"] >= began}
    if not events:
        raise ResourceError(f"{folder}: no readable log lines")
    return RunLogs(folder, events, unreadable)


def _newest(parent: Path) -> Path:
    folders = [folder for folder in parent.glob("*/") if _files(folder)]
    if not folders:
        raise ResourceError(f"{parent}: no logs of any run")
    return max(folders, key=lambda folder: max(f.stat().st_mtime_ns for f in _files(folder)))


def _files(folder: Path) -> list[Path]:
    """The logs in a folder, of each process the full one before the present one."""
    return sorted(folder.glob("*.jsonl"), key=lambda path: not path.stem.endswith(ROTATED))


def _read(path: Path) -> tuple[list[Event], int]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}") from None
    decoder = msgspec.json.Decoder(Event)
    events, bad = [], 0
    for line in data.splitlines():
        try:
            event = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            bad += 1
            continue
        if isinstance(event.get("t"), int) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            bad += 1
    return events, bad


def _since_last_start(events: list[Event]) -> list[Event]:
    starts = [i for i, event in enumerate(events) if event["event"] == "start"]
    return events[starts[-1] :] if starts else events
