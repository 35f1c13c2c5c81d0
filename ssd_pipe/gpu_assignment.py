"""Which GPU each model process of a pipeline computes on. Asks no GPU and imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import ConfigError
from ssd_pipe.members import process_name, process_names

VISIBLE = "CUDA_VISIBLE_DEVICES"


def assign(config: PipelineConfig, count: int, restricted: bool = False) -> dict[str, int]:
    """Index among ``count`` visible GPUs of every model process that computes on one.

    Where the configuration names no particular GPU, target ranks take the first ones and draft
    workers those after them in turn, or if there are none, the target's. One that is named holds
    all workers. ``restricted``: something chose which GPUs this process sees; if it is one, that is
    this rank's own, whatever its number.

    Raises ConfigError if the ranks need more GPUs than there are.
    """
    target, draft = config.target, config.draft
    given = count == 1 and restricted
    found = {}
    for rank in range(target.tp):
        index = _index(target.device, 0 if given else rank)
        if index is not None:
            if index >= count and target.tp > 1:
                raise ConfigError("target.tp", f"{target.tp} ranks need as many GPUs, not {count}")
            found[process_name(config, "target", rank)] = index
    for rank, name in enumerate(process_names(config, "draft")):
        beside = count - target.tp
        otherwise = target.tp + rank % beside if beside > 0 else rank % max(1, count)
        index = _index(draft.device, otherwise)
        if index is not None:
            found[name] = index
    return found


def _index(device: str, otherwise: int) -> int | None:
    """The index ``device`` names, ``otherwise`` if it leaves that open, None for no GPU."""
    kind, _, index = device.partition(":")
    if index:
        return int(index)
    return otherwise if kind in ("auto", "cuda") else None


def sharers(config: PipelineConfig, name: str, count: int) -> int:
    """How many processes of this pipeline may compute on the GPU of process ``name``."""
    found = assign(config, count, restricted=True)
    return max(1, sum(index == found.get(name) for index in found.values()))


def physical_gpu(index: int, environment: Mapping[str, str] = os.environ) -> str:
    """What the machine calls the GPU that this process sees as ``index``: a number or a UUID.

    CUDA numbers the entries of CUDA_VISIBLE_DEVICES from 0 in their order, up to the first that is
    none.
    """
    listed = environment.get(VISIBLE)
    if listed is None:
        return str(index)
    names = [name.strip() for name in listed.split(",")]
    return names[index] if index < len(names) else str(index)
