"""The benchmarks behind the table, each a process of its own that writes one JSON file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ssd_pipe.errors import ResourceError

GRACE = 30.0  # seconds for an interrupted part to end its pipelines
MAX_REASON = 300  # characters
PIPELINES = "bench.gpu_pipeline"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        command: arguments of ``python``; ``--output FILE`` is added.
        seconds: it usually takes on two H200s, compiling its kernels included.
        gpus: it needs.
        large: its target has 32 or 70 billion weights.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    gpus: int = 2
    large: bool = False

    def with_settings(self, settings: Sequence[str]) -> Part:
        """The same with ``--set`` for each, if it runs pipelines."""
        if PIPELINES not in self.command:
            return self
        given = [word for setting in settings for word in ("--set", setting)]
        return msgspec.structs.replace(self, command=(*self.command, *given))


class Outcome(msgspec.Struct, kw_only=True):
    """What a part left.

    Attributes:
        started: local time.
        bandwidth: bytes a second of a device copy (read plus written), measured in the same call.
        failure: why it did not end well, empty if it did.
        report: its JSON: "origin", "sections" (name -> records), "failed".
    """

    command: list[str]
    started: str
    seconds: float
    bandwidth: float
    failure: str = ""
    report: dict[str, Any] = {}

    @property
    def gpus(self) -> list[str]:
        """Names of those it ran on."""
        origin: dict[str, Any] = self.report.get("origin", {})
        names: list[str] = origin.get("gpus", [])
        return names


def _pipeline(
    name: str, seconds: float, pair: str, engines: str, *more: str, large: bool = False
) -> Part:
    command = ("-m", PIPELINES, "--pair", pair, "--engines", *engines.split(), *more)
    return Part(name=name, command=command, seconds=seconds, large=large)


PARTS = (
    Part(
        name="steps",
        command=(
            *("-m", "bench.gpu_model", "--sections", "models", "--variants", "default"),
            *("--models", "smollm2-draft-16m", "llama-3.2-1b", "llama-3.1-8b"),
        ),
        seconds=30,
        gpus=1,
    ),
    _pipeline(
        "smollm2",
        150,
        "smollm2",
        "ar sd-2 sd-3 sd-4 sd-5 ssd-3-12 ssd-3-18 ssd-4-18 ssd-5-18",
        *("--one-by-one", "--prompts", "8", "--tokens", "256"),
    ),
    _pipeline(
        "host",
        42,
        "smollm2",
        "ar ssd-host-3-12 ssd-3-12",
        *("--one-by-one", "--prompts", "6", "--tokens", "256"),
    ),
    _pipeline(
        "llama8b",
        120,
        "llama8b",
        "ar sd-3 sd-4 sd-5 ssd-3-12 ssd-4-10 ssd-5-12",
        *("--one-by-one", "--prompts", "5", "--tokens", "320"),
    ),
    _pipeline(
        "transformers",
        38,
        "smollm2",
        "ar ssd-3-18 hf hf-assisted",
        *("--prompts", "2", "--tokens", "64", "--temperature", "0"),
    ),
    _pipeline(
        "qwen32b",
        110,
        "qwen32b",
        "ar sd-3 sd-4 sd-6 ssd-5-18 ssd-8-27 ssd-11-36",
        *("--one-by-one", "--prompts", "2", "--tokens", "200"),
        large=True,
    ),
    _pipeline(
        "llama70b",
        115,
        "llama70b",
        "ar sd-8 sd-12 sd-16 ssd-16-34 ssd-20-42 ssd-24-50",
        *("--one-by-one", "--prompts", "2", "--tokens", "160"),
        large=True,
    ),
)
"""Each kind of engine counts at its own best K, so a pair has several of each, with chains longer
and shorter than the best known."""


def run_part(part: Part, folder: Path, deadline: float, bandwidth: float) -> Outcome:
    """Run it to its end, or for ``deadline`` seconds; what it prints goes to ``folder``.

    Raises ResourceError if that cannot be written to.
    """
    output, log = folder / f"{part.name}.json", folder / f"{part.name}.out"
    command = [sys.executable, *part.command, "--output", str(output)]
    outcome = Outcome(
        command=["python", *part.command],
        started=time.strftime("%Y-%m-%d %H:%M:%S"),
        seconds=0.0,
        bandwidth=bandwidth,
    )
    begun = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        output.unlink(missing_ok=True)
        outcome.failure = _run(command, log, deadline)
    except OSError as error:
        raise ResourceError(f"--log-dir {folder}: {error.strerror}") from None
    outcome.seconds = time.monotonic() - begun
    with suppress(OSError, msgspec.MsgspecError):
        outcome.report = msgspec.json.decode(output.read_bytes(), type=dict[str, Any])
    if not outcome.report and not outcome.failure:
        outcome.failure = "left no results"
    return outcome


def _run(command: list[str], log: Path, deadline: float) -> str:
    """Why the process did not end well, empty if it did. Raises OSError."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C is this process's business, which then ends the part
        )
        try:
            status = process.wait(deadline)
            return _reason(f"exit status {status}", log) if status else ""
        except subprocess.TimeoutExpired:
            return _reason(f"not done after {deadline:.0f} s", log)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it if it still runs; after a grace, kill it with whatever is left of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(what: str, log: Path) -> str:
    """With the last line so far that says what failed, or else the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith("FAILED")]
    return ": ".join([what, *(failed or lines)[-1:]])[:MAX_REASON]
