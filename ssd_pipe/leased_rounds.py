"""Whether a pipeline can run rounds without the scheduler between; see ``engine.leases``."""

from __future__ import annotations

import os

from ssd_pipe.config import PipelineConfig
from ssd_pipe.gpu_assignment import VISIBLE, assign
from ssd_pipe.gpu_count import usable_gpus
from ssd_pipe.members import process_name


def unsupported(config: PipelineConfig, device_type: str) -> str:
    """Why a process on such a device ("cpu", "cuda") cannot take part; empty if it may."""
    spec = config.speculation
    if config.mode != "ssd":
        return f"mode {config.mode}"
    if not spec.leased_rounds:
        return "speculation.leased_rounds is off"
    if device_type != "cuda":
        return "no GPU"
    if spec.rule != "shared_noise":
        return f"the rule {spec.rule!r} is judged by the host"
    if config.target.tp > 1:
        return "tensor parallelism"
    if config.draft_workers > 1:
        return "several draft workers"
    for name, section in (("target", config.target), ("draft", config.draft)):
        if section.enforce_eager or section.backend not in ("auto", "cuda"):
            return f"the {name} runs without CUDA graphs"
    return ""


def describe(config: PipelineConfig) -> str:
    """For people: what this machine would do. Opens no memory."""
    gpus = usable_gpus()
    reason = unsupported(config, "cuda" if gpus else "cpu") or _apart(config, gpus)
    return f"through the scheduler: {reason}" if reason else "leased, speculation cache on the GPU"


def _apart(config: PipelineConfig, gpus: int) -> str:
    """Why this machine's GPUs do not hold one target and one draft that reach each other; empty if
    they do."""
    found = assign(config, gpus, VISIBLE in os.environ)
    target, draft = (found.get(process_name(config, role)) for role in ("target", "draft"))
    if target is None or draft is None:
        return f"the {'target' if target is None else 'draft'} computes on the CPU"
    if max(target, draft) >= gpus:
        return f"there is no cuda:{max(target, draft)}"
    if target == draft:
        return f"target and draft would share cuda:{target}"
    import torch

    for one, other in ((draft, target), (target, draft)):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"cuda:{one} cannot reach the memory of cuda:{other}"
    return ""
