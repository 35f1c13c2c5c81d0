"""Stage times of a batch out of a run's logs, and the rate that Theorem 7 allows with them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.gpu_stages import UNCUT_SHARE, events, median_ms
from ssd_pipe.log_file import process_of

Window = tuple[float, float]
"""CLOCK_MONOTONIC seconds."""


class BatchStages(msgspec.Struct, kw_only=True):
    """Rounds in which all rows of the batch decoded. Medians in ms; None without such a stage.

    Attributes:
        rounds: how many.
        tokens_per_row: tokens a round gave a row, mean.
        hit_rate: share of rows' outcomes that were in the cache; None without a cache.
        verify_ms: a step in the target process, copies included.
        backup_ms: chains drafted just in time; ``backup_share`` of the rounds waited for them.
        glue_ms, step_ms: the draft's glue pass with the choice of branches; one step of the tree.
        tree_ms: from the start of a draft round that was not cut to its last depth, slowest of the
            draft workers.
    """

    rounds: int = 0
    tokens_per_row: float | None = None
    hit_rate: float | None = None
    verify_ms: float | None = None
    backup_ms: float | None = None
    backup_share: float = 0.0
    glue_ms: float | None = None
    step_ms: float | None = None
    tree_ms: float | None = None

    def bound(self, rows: int) -> float | None:
        """Tokens a second of ``rows`` rows if nothing but the stages took time (Theorem 7 of arXiv
        2603.03251, for a batch): a round takes the longer of verification and tree, or where it
        waits for backups, those and its verification."""
        if not self.verify_ms or not self.tokens_per_row:
            return None
        verify, waits = self.verify_ms, self.backup_share
        hidden = max(verify, self.tree_ms or 0.0)
        round_ms = (1 - waits) * hidden + waits * (verify + (self.backup_ms or 0.0))
        return 1e3 * rows * self.tokens_per_row / round_ms


def read_batch(log_dir: Path, windows: Sequence[Window], rows: int) -> BatchStages:
    """Of the run that logged there, within ``windows``, for steps of so many rows."""
    spans = [(int(begin * 1e9), int(end * 1e9)) for begin, end in windows]

    def inside(at: int) -> bool:
        return any(begin <= at <= end for begin, end in spans)

    rounds = [
        event
        for event in events(log_dir / "scheduler.jsonl", "round")
        if len(event["rows"]) == rows and inside(event["start"])
    ]
    verify = [
        event["end"] - event["start"]
        for event in events(log_dir / "target-0.jsonl", "verify")
        if event["rows"] == rows and inside(event["start"])
    ]
    outcomes = [row for event in rounds for row in event["rows"]]
    stages = BatchStages(rounds=len(rounds), verify_ms=median_ms(verify))
    if outcomes:
        stages.tokens_per_row = statistics.fmean(row["k"] + 1 for row in outcomes)
    workers = sorted(p for p in log_dir.glob("draft*.jsonl") if p.stem == process_of(p))
    if workers and outcomes:
        _add_draft(stages, workers, {event["plan"] for event in rounds})
        if stages.glue_ms is not None:
            hits = [
                row["hit"] for row in outcomes if row["hit"] is not None
            ]  # null: it ended there
            stages.hit_rate = statistics.fmean(hits) if hits else None
    return stages


def _add_draft(stages: BatchStages, workers: Sequence[Path], plans: set[int]) -> None:
    """From the workers' logs, of the draft rounds that went with these plans."""
    backup, glue, step = [], [], []
    trees: list[float] = []
    for path in workers:
        tree, drafted = [], 0
        for event in events(path, "draft"):
            if event["round"] not in plans:
                continue
            start, made, glued = event["start"], event["backup"], event["glue"]
            depths = event["depths"]
            drafted += 1
            if made > start:
                backup.append(made - start)
            if glued > made:
                glue.append(glued - made)
            if depths:
                step.append((depths[-1] - glued) / len(depths))
                if not event["cut"] and made == start:
                    tree.append(depths[-1] - start)
        if tree and len(tree) >= drafted * UNCUT_SHARE:
            trees.append(statistics.median(tree) * 1e-6)
    stages.backup_ms = median_ms(backup)
    stages.backup_share = len(backup) / stages.rounds
    stages.glue_ms, stages.step_ms = median_ms(glue), median_ms(step)
    stages.tree_ms = max(trees, default=None)
