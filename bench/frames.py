"""The frames a comparison is made in: which process computes on which cores.

Frame "a" is the paper's: equal target hardware. AR and SD have one core, on which target and draft
take turns; SSD has the same core for the target and one more for the draft. transformers, which has
target, draft and its own bookkeeping in one process, gets that first core. Our frontend and
scheduler do no arithmetic; they run on the second core in every mode alike (``host_cpus`` says
otherwise), which in SSD they share with the draft.

Frame "b" gives every engine all cores and nothing is pinned. Frame "own" leaves devices, threads
and cores as the configuration says, which is the one for GPUs. Servers of other engines place
themselves in every frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ssd_pipe.config import Mode, PipelineConfig
from ssd_pipe.errors import ConfigError
from ssd_pipe.threads import available_cores

NAMES = ("a", "b", "own")
BASELINES = ("ar", "sd")
TITLES = {
    "a": "equal target hardware: one core for the target; SSD has one more for the draft",
    "b": "all cores for every engine",
    "own": "devices and cores as configured",
}
WIDE = "ssd-wide-draft"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where one engine computes, ``host_cpus`` is for what does not; empty = anywhere."""

    threads: int
    cpus: list[int] = []
    host_cpus: list[int] = []
    draft_threads: int = 1
    draft_cpus: list[int] = []


def layout(frame: str, engine: str) -> Layout | None:
    """Where ``engine`` computes in ``frame``; None: as its configuration says.

    Raises ConfigError if this machine cannot hold the frame, or the frame is none.
    """
    if frame not in NAMES:
        raise ConfigError("--frames", f"{frame!r} is none of: {', '.join(NAMES)}")
    cores = available_cores()
    parallel = engine.startswith("ssd")
    if frame == "a":
        if len(cores) < 2:
            raise ConfigError("--frames", "frame a needs two cores, one is available here")
        first, second = cores[:1], cores[1:2]
        draft = second if parallel else first
        return Layout(threads=1, cpus=first, draft_cpus=draft, host_cpus=second)
    if frame == "b":
        alone = parallel and engine != WIDE
        return Layout(threads=len(cores), draft_threads=1 if alone else len(cores))
    return None


def in_frame(frame: str, engine: str) -> bool:
    """Whether an engine makes sense there: a wide draft needs more than one core to be on."""
    return engine != WIDE or (frame == "b" and len(available_cores()) > 1)


def usual(config: PipelineConfig) -> list[str]:
    """The frames of a run that names none."""
    if config.target.device.startswith("cuda"):
        return ["own"]
    return ["a", "b"] if len(available_cores()) > 1 else ["b"]


def mode_of(engine: str) -> Mode:
    """The pipeline mode an engine's name begins with."""
    modes: dict[str, Mode] = {"ar": "ar", "sd": "sd", "ssd": "ssd"}
    return modes[engine.partition("-")[0]]


def placed(
    base: PipelineConfig, mode: Mode, where: Layout | None, host_cpus: Sequence[int] = ()
) -> PipelineConfig:
    """``base`` in ``mode`` on the cores of ``where``; ``host_cpus``, if any, go before its own."""
    change: Callable[..., Any] = msgspec.structs.replace
    if where is None:
        run = change(base.run, cpus=list(host_cpus)) if host_cpus else base.run
        return change(base, mode=mode, run=run)
    return change(
        base,
        mode=mode,
        target=change(base.target, threads=where.threads, cpus=where.cpus),
        draft=change(base.draft, threads=where.draft_threads, cpus=where.draft_cpus),
        run=change(base.run, cpus=list(host_cpus) or where.host_cpus),
    )
