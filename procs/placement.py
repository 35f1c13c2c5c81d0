"""Which device a model process computes on, and how much KV fits there."""

from __future__ import annotations

import torch

from ipc.doorbell import default_spin_us
from models.registry import resolve_device
from models.transformer import Transformer
from ssd_pipe.config import ModelSection, PipelineConfig
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.errors import ConfigError


def place(config: PipelineConfig, role: str, rank: int = 0) -> torch.device:
    """The device of a process; a GPU becomes this process's current one.

    Where the configuration names no particular GPU, target ranks take the first ones and the draft
    the one after them, or shares the first if there is none left. Raises ConfigError.
    """
    section: ModelSection = config.draft if role == "draft" else config.target
    wanted = section.device
    if wanted in ("auto", "cuda") and torch.cuda.is_available():
        count = torch.cuda.device_count()
        index = config.target.tp if role == "draft" else rank
        if role == "target" and index >= count:
            raise ConfigError(
                "target.tp", f"{config.target.tp} ranks need as many GPUs, not {count}"
            )
        wanted = f"cuda:{index if index < count else 0}"
    device = resolve_device(wanted)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def kv_blocks(
    model: Transformer,
    config: PipelineConfig,
    sizes: Dimensions,
    section: ModelSection,
    fixed: int,
    planned: int,
) -> int:
    """KV blocks for trunks of one model: ``fixed`` if set, else on a CPU what was ``planned``, on a
    GPU what every running sequence can use, as far as the memory goes.

    Raises ConfigError if that does not hold one request of full length.
    """
    if fixed or model.backend.device.type != "cuda":
        return planned
    size = config.cache.block_size
    one = -(-(sizes.max_model_len + sizes.k + 1) // size)
    free, _ = torch.cuda.mem_get_info(model.backend.device)
    affordable = int(free * section.memory_share) // model.kv_bytes_per_block(size)
    if affordable < one:
        raise ConfigError(
            "scheduler.max_model_len",
            f"the GPU has room for {affordable * size} tokens of KV, not {sizes.max_model_len}",
        )
    return min(one * sizes.slots, affordable)


def spin_us(device: torch.device) -> int:
    """Microseconds a model process looks for its next message before it sleeps."""
    return default_spin_us() if device.type == "cuda" else 0
