"""Which process computes with how many CPU threads, and how that is told to the libraries."""

from __future__ import annotations

import os

from ssd_pipe.config import ModelSection, PipelineConfig
from ssd_pipe.errors import ConfigError

SPIN_COUNT = "2000"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def available_cores() -> list[int]:
    """Cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def check_cpus(config: PipelineConfig) -> None:
    """Raise ConfigError for a core that is asked for and not available here."""
    cores = available_cores()
    for name, section in (("target", config.target), ("draft", config.draft)):
        missing = [core for core in section.cpus if core not in cores]
        if missing:
            raise ConfigError(
                f"{name}.cpus", f"core {missing[0]} is not available here, these are: {cores}"
            )


def thread_count(config: PipelineConfig, role: str, cores: int | None = None) -> int:
    """Threads of one process of ``role``; ``cores`` None = those available here.

    The setting ``threads`` decides if it is not 0, then the number of ``cpus``. Otherwise: alone or
    taking turns (ar, sd), target and draft each use every core; in ssd, where both are busy at
    once, the draft, which has the smaller model, gets a quarter of the cores (at least one) and
    the target the rest. Target ranks share the target's cores.
    Frontend and scheduler do no arithmetic: 1.
    """
    if role not in ("target", "draft"):
        return 1
    section: ModelSection = config.target if role == "target" else config.draft
    if section.threads:
        return section.threads
    ranks = config.target.tp if role == "target" else 1
    total = cores if cores is not None else len(available_cores())
    if section.cpus:
        share = len(section.cpus)
    elif config.mode != "ssd":
        share = total
    else:
        drafting = max(1, total // 4)
        share = drafting if role == "draft" else total - drafting
    return max(1, share // ranks)


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
