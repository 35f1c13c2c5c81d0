"""Which processes a pipeline has and what they are called."""

from __future__ import annotations

from ssd_pipe.config import PipelineConfig

HUB_ROLE = "scheduler"
"""Role, and name, of the process that all others answer to."""

SUPERVISOR_VARIABLE = "SSD_SUPERVISOR_PID"
"""Tells a process that a supervisor started it, and which."""

STOP_STAGES = (("gateway",), ("frontend",), ("scheduler",), ("target", "draft"))
"""Roles in the order in which a pipeline ends, those of one stage together."""


def process_count(config: PipelineConfig, role: str) -> int:
    """Processes of ``role``; 0 if this pipeline has none."""
    counts = {
        "target": config.target.tp,
        "draft": config.draft_workers,
        "gateway": int(config.gateway.enabled),
    }
    return counts.get(role, 1)


def process_name(config: PipelineConfig, role: str, rank: int = 0) -> str:
    """The name a process goes by everywhere: its role, with the rank for a target and for one of
    several drafts."""
    ranked = role == "target" or (role == "draft" and config.draft_workers > 1)
    return f"{role}-{rank}" if ranked else role


def process_title(name: str) -> str:
    """What the system's own ps and top call a process."""
    return f"ssd-{name}"


def process_names(config: PipelineConfig, role: str) -> list[str]:
    """Names of all processes of ``role``, by rank."""
    return [process_name(config, role, rank) for rank in range(process_count(config, role))]
