"""Which device a model process computes on, with how many threads, and how much KV fits there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from ipc.doorbell import default_spin_us
from models.registry import resolve_device
from models.transformer import Transformer
from procs.runtime import Runtime
from ssd_pipe.config import ModelSection, PipelineConfig
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.errors import ConfigError
from ssd_pipe.gpu_assignment import VISIBLE, assign, sharers
from ssd_pipe.members import process_name
from ssd_pipe.threads import lent_threads, process_cores, worker_cores


def place(config: PipelineConfig, role: str, rank: int = 0) -> torch.device:
    """The device of a process; a GPU becomes this process's current one. Raises ConfigError."""
    section: ModelSection = config.draft if role == "draft" else config.target
    wanted = section.device
    if wanted in ("auto", "cuda") and torch.cuda.is_available():
        found = assign(config, torch.cuda.device_count(), VISIBLE in os.environ)
        wanted = f"cuda:{found[process_name(config, role, rank)]}"
    device = resolve_device(wanted)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def kv_blocks(
    model: Transformer,
    config: PipelineConfig,
    sizes: Dimensions,
    role: str,
    rank: int = 0,
) -> int:
    """KV blocks for trunks of one model: as configured if set, else on a CPU what was planned, on a
    GPU what every running sequence can use, as far as the memory goes, which processes that share
    the GPU divide.

    Raises ConfigError if that does not hold one request of full length.
    """
    section: ModelSection = config.draft if role == "draft" else config.target
    cache = config.cache
    fixed, planned = (
        (cache.draft_blocks, sizes.draft_blocks)
        if role == "draft"
        else (cache.target_blocks, sizes.target_blocks)
    )
    if fixed or model.backend.device.type != "cuda":
        return planned
    size = cache.block_size
    one = -(-(sizes.max_model_len + sizes.k + 1) // size)
    free, _ = torch.cuda.mem_get_info(model.backend.device)
    share = section.memory_share / sharers(
        config, process_name(config, role, rank), torch.cuda.device_count()
    )
    affordable = int(free * share) // model.kv_bytes_per_block(size)
    if affordable < one:
        raise ConfigError(
            "scheduler.max_model_len",
            f"the GPU has room for {affordable * size} tokens of KV, not {sizes.max_model_len}",
        )
    return min(one * sizes.slots, affordable)


class Threads:
    """CPU threads and cores of a model process: its share, or all while the other model rests."""

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        config, role, cores = runtime.config, runtime.role, runtime.cores
        lent = lent_threads(config, role, len(cores))
        own = process_cores(config, role, cores) or cores
        if role == "draft":
            own = worker_cores(config, own, runtime.rank)
        self._share = self._now = (runtime.threads, own)
        lends = device.type == "cpu" and lent != runtime.threads
        self._all = (lent, cores) if lends else self._share

    def use(self, alone: bool) -> None:
        """Compute with everything from now on, or with this process's share."""
        wanted = self._all if alone else self._share
        if wanted is self._now:
            return
        self._now = wanted
        threads, cores = wanted
        for task in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(task.name), cores)
        torch.set_num_threads(threads)


def spin_us(device: torch.device) -> int:
    """Microseconds a model process looks for its next message before it sleeps."""
    return default_spin_us() if device.type == "cuda" else 0
