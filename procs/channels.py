"""Names of the hot-path channels and segments of a run."""

from __future__ import annotations

RESULTS = "target.result"
SPECULATION_CACHE = "speculation-cache"
RECORDS = "round-records"
"""Segment that target rank 0 makes for leased rounds."""


def target_plans(rank: int) -> str:
    """The channel that carries step plans to a target rank."""
    return f"target-{rank}.plan"


def draft_plans(worker: int) -> str:
    """The channel that carries draft plans to a draft worker."""
    return f"draft-{worker}.plan"


def draft_notices(worker: int) -> str:
    """The channel that carries a draft worker's notices to the scheduler."""
    return f"draft-{worker}.notice"


def handover(worker: int) -> str:
    """The segment and the doorbell of a draft worker's hand-overs to target rank 0."""
    return f"handover-{worker}"
