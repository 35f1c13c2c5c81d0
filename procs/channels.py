"""Names of the hot-path channels and segments of a run."""

from __future__ import annotations

RESULTS = "target.result"
DRAFT_PLANS = "draft.plan"
DRAFT_NOTICES = "draft.notice"
RECORDS = "round-records"
"""Segment that target rank 0 makes for leased rounds."""


def target_plans(rank: int) -> str:
    """The channel that carries step plans to a target rank."""
    return f"target-{rank}.plan"
