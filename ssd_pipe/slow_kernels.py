"""Telling that plain torch computes where faster kernels were to, and why. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from structlog.typing import FilteringBoundLogger

from ipc.messages.hub import ProcessState
from ssd_pipe.members import SUPERVISOR_VARIABLE

NOTE = "no fast kernels"
"""What the reason is called among a process's notes."""


def note(notes: dict[str, str], log: FilteringBoundLogger, reason: str) -> None:
    """In a process: note and log the ``reason``, if there is one.

    A supervisor says it once for all processes when it hears of the notes; alone, the process says
    it on its own terminal.
    """
    if reason:
        notes[NOTE] = reason
        log.warning(_text(reason), file_only=SUPERVISOR_VARIABLE in os.environ)


def warnings(processes: Iterable[ProcessState]) -> Iterator[tuple[str, str]]:
    """In the supervisor: each reason as a line to show, and the names of the processes it is of."""
    lacking: dict[str, list[str]] = {}
    for process in processes:
        if reason := process.notes.get(NOTE):
            lacking.setdefault(reason, []).append(process.name)
    for reason, names in lacking.items():
        yield _text(reason), ", ".join(names)


def _text(reason: str) -> str:
    return f"{NOTE}, plain torch is several times slower: {reason}"
