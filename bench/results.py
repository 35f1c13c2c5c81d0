"""The results file: everything a run has found so far, whole at any time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from ssd_pipe.errors import ResourceError

FOLDER = Path(__file__).parent / "results"
VERSION = 2


def output_file(given: str) -> Path:
    """Where results go by what is ``given`` as --output: the file, or a new one in a folder that is
    there or whose name ends in a slash."""
    path = Path(given)
    return path / _fresh_name() if given.endswith("/") or path.is_dir() else path


def _fresh_name() -> str:
    return time.strftime("%Y-%m-%dT%H%M%S.json")


class Results:
    """A JSON document that is written anew after each part, so that a broken run keeps its parts.

    Until the first part there is no file, and what an earlier run left under the name stays.
    Raises ResourceError if it cannot be written, in the first place if it will not be.

    Attributes:
        path: the file.
        written: whether it holds this run's results.
    """

    def __init__(self, path: Path | None, heading: dict[str, Any]) -> None:
        self.path = path if path is not None else FOLDER / _fresh_name()
        self._content: dict[str, Any] = {
            "version": VERSION,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **heading,
        }
        self.written = False
        self._save(keep=False)

    def describe(self, part: str, content: Any) -> None:
        """Set ``part`` of the heading, to be written with the first result."""
        self._content[part] = msgspec.to_builtins(content)

    def add(self, part: str, content: Any) -> None:
        """Set ``part`` to ``content``: structs and plain values."""
        self.describe(part, content)
        self._save()

    def _save(self, keep: bool = True) -> None:
        write(self.path, self._content, keep)
        self.written = self.written or keep


def write(path: Path, content: Any, keep: bool = True) -> None:
    """Put ``content`` there as JSON, all of it or none; not ``keep``: only see whether one could.

    Raises ResourceError.
    """
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}-{os.getpid()}")
        # Results are for others too, whose home is elsewhere.
        fresh.write_bytes(text.replace(str(Path.home()).encode() + b"/", b"~/") + b"\n")
        if keep:
            fresh.rename(path)
        else:
            fresh.unlink()
    except OSError as error:
        raise ResourceError(f"results file {path}: {error.strerror}") from None
