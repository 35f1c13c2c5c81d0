"""What a call of the table runs, in what time, and the file it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from bench.gpu_table.parts import Outcome, Part, run_part
from bench.gpu_table.rows import Line, Row
from ssd_pipe.errors import ConfigError, ResourceError

PATIENCE = 4.0  # usual times after which a part is ended


class Content(msgspec.Struct, kw_only=True):
    """The results file. ``heading``: of the latest call; every part has its own in its report."""

    heading: dict[str, object] = {}
    lines: list[Line] = []
    parts: dict[str, Outcome] = {}

    @property
    def good(self) -> set[str]:
        """Parts that ended well."""
        return {name for name, outcome in self.parts.items() if not outcome.failure}

    def has(self, part: Part) -> bool:
        """Whether the part ended well, with the settings it is to have."""
        return part.name in self.good and self.parts[part.name].command[1:] == list(part.command)

    @property
    def status(self) -> int:
        """Of the process: 1 if a part or a row failed, or there is none."""
        failed = len(self.good) < len(self.parts) or any(x.state == "failed" for x in self.lines)
        return 1 if failed or not self.parts else 0


def opened(path: Path) -> Content:
    """The file an earlier call left, empty if there is none. Raises ResourceError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Content)
    except FileNotFoundError:
        return Content()
    except (OSError, msgspec.MsgspecError) as error:
        raise ResourceError(f"{path}: not a file of this program: {error}") from None


def choose(
    parts: Sequence[Part], rows: Sequence[Row], only: Sequence[str], skip_large: bool
) -> dict[str, str]:
    """Parts to leave out, each with the reason. ``only``: rows and parts, everything if empty.

    Raises ConfigError for a name that is neither.
    """
    by_name = {part.name: part.name for part in parts} | {row.name: row.part for row in rows}
    if unknown := [name for name in only if name not in by_name]:
        names = ", ".join(by_name)
        raise ConfigError("--only", f"no row or part {', '.join(unknown)}; there are {names}")
    wanted = {by_name[name] for name in only or by_name}
    left_out = {part.name: "not asked for" for part in parts if part.name not in wanted}
    if skip_large:
        left_out |= {part.name: "left out by --skip-large" for part in parts if part.large}
    return left_out


def missing(gpus: int) -> str:
    """What this machine lacks for parts that need so many GPUs, one line; empty if nothing."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < gpus:
        return f"this table needs {gpus} CUDA devices, torch {torch.__version__} sees {count} here"
    if find_spec("triton") is None:
        return "this table needs Triton, which is not installed: pip install 'ssd-pipe[cuda]'"
    return ""


def measure(
    parts: Sequence[Part],
    outcomes: dict[str, Outcome],
    folder: Path,
    bandwidth: float,
    seconds: float | None,
    told: Callable[[str], None],
    done: Callable[[], None],
) -> dict[str, str]:
    """Run ``parts`` one after another into ``outcomes``; whatever one comes to, the others go on.

    Args:
        folder: for what they print and write.
        bandwidth: bytes a second of a device copy, measured in this call.
        seconds: they have in all, None for no limit; a part that usually takes longer than what is
            left is not begun, and returned with the reason.
        told: gets a line before and after each part.
        done: called after each part.
    """
    left_out = {}
    end = None if seconds is None else time.monotonic() + seconds
    for part in parts:
        deadline = PATIENCE * part.seconds
        if end is not None:
            left = max(0.0, end - time.monotonic())
            if part.seconds > left:
                left_out[part.name] = f"takes about {part.seconds:g} s, {left:.0f} s were left"
                continue
            deadline = min(deadline, left)
        told(f"{part.name}: takes about {part.seconds:g} s")
        outcome = run_part(part, folder, deadline, bandwidth)
        outcomes[part.name] = outcome
        how = f"FAILED, {outcome.failure}" if outcome.failure else "done"
        told(f"{part.name}: {how}, after {outcome.seconds:.0f} s")
        done()
    return left_out
