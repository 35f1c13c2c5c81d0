"""Results files read back: every row with the samples it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.rows import TOTAL
from ssd_pipe.errors import ConfigError

SWEEP = "sweep"


class Entry(msgspec.Struct, kw_only=True):
    """One row.

    Attributes:
        part: "frame a", "frame b", "frame own" or "sweep".
        row: as ``rows.Row``.
        samples: as ``rows.sample_record``; empty if the file was kept without them.
    """

    part: str
    row: dict[str, Any]
    samples: list[dict[str, Any]]

    @property
    def engine(self) -> str:
        engine: str = self.row["engine"]
        return engine

    @property
    def set(self) -> str:
        return self.row.get("set") or TOTAL

    @property
    def point(self) -> dict[str, Any]:
        point: dict[str, Any] = self.row.get("point") or {}
        return point

    @property
    def key(self) -> str:
        """What rows of two files that can be compared have in common."""
        point = "".join(f" {name}={value}" for name, value in sorted(self.point.items()))
        return f"{self.part}: {self.engine}{point}, {self.set}"


class Loaded(msgspec.Struct, kw_only=True):
    """A results file: ``heading`` has command, versions, machine and plan."""

    path: Path
    heading: dict[str, Any]
    entries: list[Entry]

    @property
    def k(self) -> int:
        """Draft tokens a round where no axis says it."""
        return int(self._setting("k", 5))

    @property
    def allocation(self) -> str:
        return str(self._setting("allocation", ""))

    @property
    def rule(self) -> str:
        return str(self._setting("rule", "shared_noise"))

    def _setting(self, name: str, otherwise: Any) -> Any:
        plan = self.heading.get("plan", {})
        return plan.get("config", {}).get("speculation", {}).get(name, otherwise)


def read(path: Path) -> Loaded:
    """Raises ConfigError for a file that is not there or has no rows."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "cannot be read") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(str(path), f"is no results file: {error}") from None
    entries = []
    for frame in content.get("frames", ()):
        part = f"frame {frame['frame']}"
        entries += [_entry(part, row, frame.get("samples", ())) for row in frame["rows"]]
        for rows in frame.get("set_rows", {}).values():
            entries += [_entry(part, row, frame.get("samples", ())) for row in rows]
    swept = content.get(SWEEP, {})
    entries += [_entry(SWEEP, row, swept.get("samples", ())) for row in swept.get("rows", ())]
    if not entries:
        raise ConfigError(str(path), "has no rows of frames or sweeps")
    heading = {k: v for k, v in content.items() if k not in ("frames", SWEEP)}
    return Loaded(path=path, heading=heading, entries=entries)


def _entry(part: str, row: dict[str, Any], samples: Sequence[dict[str, Any]]) -> Entry:
    prompt_set = row.get("set", "")
    mine = [
        s
        for s in samples
        if s["engine"] == row["engine"]
        and prompt_set in ("", TOTAL, s.get("set", ""))
        and s.get("point", {}) == row.get("point", {})
    ]
    return Entry(part=part, row=row, samples=mine)
