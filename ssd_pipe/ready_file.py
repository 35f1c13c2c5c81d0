"""The file that tells others that a pipeline is ready, and where."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ssd_pipe.errors import ConfigError
from ssd_pipe.relay import Sink

OPTION = "--ready-file"


def check_place(path: Path) -> None:
    """Raise ConfigError naming the option if no file can be written there."""
    folder = path.parent
    if path.is_dir():
        raise ConfigError(OPTION, f"{path} is a folder")
    if not folder.is_dir():
        raise ConfigError(OPTION, f"{folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(OPTION, f"{folder} cannot be written to")


def write(path: Path, facts: Mapping[str, Any], sink: Sink, again: bool) -> None:
    """As JSON, in one step: whoever finds the file finds it whole.

    Raises OSError, since somebody may wait for it; ``again``, after a restart, that is a warning.
    """
    try:
        write_atomically(path, msgspec.json.encode(facts))
    except OSError as error:
        if not again:
            raise
        _warn(sink, "written", path, error)


def remove(path: Path, sink: Sink) -> None:
    """It may be gone already; one that cannot be removed is a warning."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _warn(sink, "removed", path, error)


def write_atomically(path: Path, content: bytes) -> None:
    """Put a whole file there or none. Raises OSError."""
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    fresh.write_bytes(content)
    fresh.rename(path)


def _warn(sink: Sink, what: str, path: Path, error: OSError) -> None:
    reason = error.strerror or type(error).__name__
    sink.event("warning", f"the ready file cannot be {what}", path=str(path), reason=reason)
