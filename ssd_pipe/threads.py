"""Which process computes with how many CPU threads, and how that is told to the libraries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ssd_pipe.config import ModelSection, PipelineConfig
from ssd_pipe.errors import ConfigError
from ssd_pipe.members import process_count

SPIN_COUNT = "2000"
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")
"""One of them is there where torch finds a "cuda" device: NVIDIA, WSL 2, Tegra, ROCm."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def available_cores() -> list[int]:
    """Cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def has_gpu() -> bool:
    """Whether this machine has a GPU driver, found without torch."""
    return any(Path(device).exists() for device in GPU_DEVICES)


def check_cpus(config: PipelineConfig) -> None:
    """Raise ConfigError for a core that is asked for and not available here."""
    cores = available_cores()
    asked = {"target": config.target.cpus, "draft": config.draft.cpus, "run": config.run.cpus}
    for name, cpus in asked.items():
        missing = [core for core in cpus if core not in cores]
        if missing:
            raise ConfigError(
                f"{name}.cpus", f"core {missing[0]} is not available here, these are: {cores}"
            )


def process_cores(
    config: PipelineConfig, role: str, cores: Sequence[int] | None = None
) -> list[int]:
    """Cores that a process of ``role`` keeps to, empty = any of ``cores`` (None: available here).

    The settings ``cpus`` decide where they say something. Otherwise, in ssd on a CPU, where target
    and draft compute at once and leave no core over, each gets cores of its own, and the processes
    that do no arithmetic go with the draft: they are busiest when a verification has ended, and on
    the target's core they would stand in the way of the next one.
    """
    cores = available_cores() if cores is None else list(cores)
    sections: dict[str, ModelSection] = {"target": config.target, "draft": config.draft}
    own = sections[role].cpus if role in sections else config.run.cpus
    if own or config.mode != "ssd" or not on_cpu(config):
        return own
    target = config.target.cpus
    drafting = config.draft.cpus
    if not target and not drafting:
        wanted = thread_count(config, "target", len(cores)) * config.target.tp
        beside = _drafting(config, len(cores))
        if wanted + beside != len(cores):
            return []  # the operating system has room to move, or none to keep apart
        target, drafting = cores[:wanted], cores[wanted:]
    elif set(target) & set(drafting) or set(target) | set(drafting) != set(cores):
        return []
    return target if role == "target" else drafting


def on_cpu(config: PipelineConfig) -> bool:
    """Whether the models run on CPU cores."""
    devices = {config.target.device, config.draft.device}
    return devices == {"cpu"} or (devices <= {"cpu", "auto"} and not has_gpu())


def thread_count(config: PipelineConfig, role: str, cores: int | None = None) -> int:
    """Threads of one process of ``role``; ``cores`` None = those available here.

    The setting ``threads`` decides if it is not 0, then the number of ``cpus``. Otherwise: alone or
    taking turns (ar, sd), target and draft each use every core; in ssd, where both are busy at
    once, a draft worker, which has the smaller model, gets a quarter of the cores (at least one),
    several of them at most half, and the target the rest. Target ranks share the target's cores,
    draft workers the draft's.
    Frontend and scheduler do no arithmetic: 1.
    """
    if role not in ("target", "draft"):
        return 1
    section: ModelSection = config.target if role == "target" else config.draft
    if section.threads:
        return section.threads
    processes = max(1, process_count(config, role))
    total = cores if cores is not None else len(available_cores())
    if section.cpus:
        share = len(section.cpus)
    elif config.mode != "ssd":
        share = total
    else:
        drafting = _share_of_drafts(config, total)
        share = drafting if role == "draft" else total - drafting
    return max(1, share // processes)


def _share_of_drafts(config: PipelineConfig, total: int) -> int:
    """Cores of all draft workers together, in ssd."""
    return max(1, min(total // 2, config.draft_workers * max(1, total // 4)))


def _drafting(config: PipelineConfig, total: int) -> int:
    """Cores that the draft workers keep busy, in ssd."""
    if config.draft.threads:
        return config.draft.threads * config.draft_workers
    return _share_of_drafts(config, total)


def worker_cores(config: PipelineConfig, cores: list[int], worker: int) -> list[int]:
    """The part of the draft's ``cores`` that one of its workers keeps to; all of them if there is
    not one for each."""
    each = len(cores) // config.draft_workers
    return cores[worker * each : (worker + 1) * each] if each else cores


def lent_threads(config: PipelineConfig, role: str, cores: int | None = None) -> int:
    """Threads of a process of ``role`` while the other model's processes rest.

    In ssd, where nothing is said about threads or cores, one on each; else as ever.
    """
    sections = (config.target, config.draft)
    if config.mode != "ssd" or any(section.threads or section.cpus for section in sections):
        return thread_count(config, role, cores)
    total = cores if cores is not None else len(available_cores())
    return max(1, total // max(1, process_count(config, role)))


def thread_environment(config: PipelineConfig, role: str) -> dict[str, str]:
    """Environment variables to set before a numeric library is imported.

    A variable the user has set stays, unless the configuration asks for a number itself.
    """
    section = {"target": config.target, "draft": config.draft}.get(role)
    count = str(thread_count(config, role))
    explicit = section is not None and (section.threads or section.cpus)
    variables = {v: count for v in THREAD_VARIABLES if explicit or v not in os.environ}
    # libgomp's threads otherwise spin for milliseconds after each region, on cores that another
    # process of the pipeline needs.
    variables.setdefault("GOMP_SPINCOUNT", os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT))
    return variables
