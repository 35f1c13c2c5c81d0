"""The two frames a comparison is made in: which process computes on which cores.

Frame "a" is the paper's: equal target hardware. AR and SD have one core, on which target and draft
take turns; SSD has the same core for the target and one more for the draft. transformers, which has
target, draft and its own bookkeeping in one process, gets that first core. Our frontend and
scheduler do no arithmetic; they run on the second core in every mode alike (``host_cpus`` says
otherwise), which in SSD they share with the draft.

Frame "b" gives every engine all cores and nothing is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.engines import Engine, PipelineEngine
from bench.transformers_engine import TransformersEngine
from ssd_pipe.config import Mode, PipelineConfig
from ssd_pipe.errors import ConfigError
from ssd_pipe.threads import available_cores

NAMES = ("a", "b")
BASELINES = ("ar", "sd")
TITLES = {
    "a": "equal target hardware: one core for the target; SSD has one more for the draft",
    "b": "all cores for every engine",
}


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where one engine computes, ``host_cpus`` is for what does not; empty = anywhere."""

    threads: int
    cpus: list[int] = []
    host_cpus: list[int] = []
    draft_threads: int = 1
    draft_cpus: list[int] = []


def layouts(frame: str) -> dict[str, Layout]:
    """Engine name -> layout. Raises ConfigError if this machine cannot hold the frame."""
    cores = available_cores()
    if frame == "a":
        if len(cores) < 2:
            raise ConfigError("--frames", "frame a needs two cores, one is available here")
        first, second = cores[:1], cores[1:2]
        alone = Layout(threads=1, cpus=first, draft_cpus=first, host_cpus=second)
        apart = Layout(threads=1, cpus=first, draft_cpus=second, host_cpus=second)
        return {
            "ar": alone,
            "sd": alone,
            "ssd": apart,
            "transformers": alone,
            "assisted": alone,
        }
    if frame == "b":
        count = len(cores)
        both = Layout(threads=count, draft_threads=count)
        one = Layout(threads=count, draft_threads=1)
        wide = {"ssd-wide-draft": both} if count > 1 else {}
        return {"ar": both, "sd": both, "ssd": one, **wide, "transformers": both, "assisted": both}
    raise ConfigError("--frames", f"{frame!r} is none of: {', '.join(NAMES)}")


def build(
    frame: str,
    names: Sequence[str],
    base: PipelineConfig,
    folders: Callable[[str], Path],
    host_cpus: Sequence[int],
) -> list[Engine]:
    """Engines of a frame whose names are among ``names`` (empty = all), not started.

    Args:
        base: settings that all modes share.
        folders: model name -> folder, for transformers.
    """
    engines: list[Engine] = []
    for name, layout in layouts(frame).items():
        if names and name not in names:
            continue
        if name in ("transformers", "assisted"):
            engines.append(
                TransformersEngine(
                    name,
                    folders(base.target.model),
                    folders(base.draft.model) if name == "assisted" else None,
                    layout.threads,
                    layout.cpus,
                )
            )
        else:
            engines.append(PipelineEngine(name, placed(base, mode_of(name), layout, host_cpus)))
    return engines


def mode_of(engine: str) -> Mode:
    """The pipeline mode an engine's name begins with."""
    modes: dict[str, Mode] = {"ar": "ar", "sd": "sd", "ssd": "ssd"}
    return modes[engine.partition("-")[0]]


def placed(
    base: PipelineConfig, mode: Mode, layout: Layout, host_cpus: Sequence[int] = ()
) -> PipelineConfig:
    """``base`` in ``mode`` on the cores of ``layout``; ``host_cpus``, if any, go before its own."""
    change: Callable[..., Any] = msgspec.structs.replace
    return change(
        base,
        mode=mode,
        target=change(base.target, threads=layout.threads, cpus=layout.cpus),
        draft=change(base.draft, threads=layout.draft_threads, cpus=layout.draft_cpus),
        run=change(base.run, cpus=list(host_cpus) or layout.host_cpus),
    )
