"""Whether a pipeline can run rounds without the scheduler between; see ``engine.leases``."""

from __future__ import annotations

from ssd_pipe.config import PipelineConfig
from ssd_pipe.gpu_count import usable_gpus


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
    reason = unsupported(config, "cuda" if gpus else "cpu")
    if not reason and gpus < 2:
        reason = "target and draft would share a GPU"
    if not reason:
        import torch

        if not torch.cuda.can_device_access_peer(1, 0):
            reason = "the GPUs cannot reach each other's memory"
    return f"through the scheduler: {reason}" if reason else "leased, speculation cache on the GPU"
