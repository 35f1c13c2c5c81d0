"""Stage times out of a run's logs, and the rate that Theorem 7 allows with them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.rows import Row
from ssd_pipe.log_file import process_of

LONGEST = 40  # tokens of a step; of more they are prompts
UNCUT_SHARE = 0.3
"""Of the draft's rounds; with fewer, those not cut are the odd ones (a prompt was read, say)."""


class Stages(msgspec.Struct, kw_only=True):
    """Medians over a run's rounds, ms; None where the engine has no such stage.

    Attributes:
        verify_ms: a step of decoding or verification in the target process, copies included.
        backup_ms: a chain drafted just in time; ``backups`` of them.
        glue_ms: the glue pass and the choice of branches.
        step_ms: one step of the tree.
        hit_gap_us: on a hit that waits for no more of its chain, from one step's choice of tokens
            to the start of the next; the target process's own times, or, where rounds are leased,
            the GPU's.
        hit_round_ms: on such a hit, from one step's start to the next one's.
        hits, hits_ready: rounds of one row after hits, and those of them that waited for no more.
        leased: share of the decoding steps that ran under a lease.
        tree_ms: from the start of a round that was not cut to its last depth; None where most
            are cut, so that verification alone sets the pace.
        cached_ms: a round on a hit with nothing lost: the longer of verification and drafting what
            it verifies (a glue pass, and a step of the tree a token); mean.
    """

    verify_ms: float | None = None
    backup_ms: float | None = None
    glue_ms: float | None = None
    step_ms: float | None = None
    tree_ms: float | None = None
    backups: int = 0
    hit_gap_us: float | None = None
    hit_round_ms: float | None = None
    hits: int = 0
    hits_ready: int = 0
    leased: float | None = None
    cached_ms: float | None = None


def read_stages(log_dir: Path) -> Stages:
    """Of the run that logged there."""
    verify, backup, glue, step, tree = [], [], [], [], []
    for event in events(log_dir / "target-0.jsonl", "verify"):
        if event["tokens"] <= LONGEST:
            verify.append(event["end"] - event["start"])
    drafts = sorted(p for p in log_dir.glob("draft*.jsonl") if p.stem == process_of(p))
    for event in (event for path in drafts for event in events(path, "draft")):
        start, drafted, glued, depths = (event[n] for n in ("start", "backup", "glue", "depths"))
        if drafted > start:
            backup.append(drafted - start)
        if glued > drafted:
            glue.append(glued - drafted)
        if depths:
            step.append((depths[-1] - glued) / len(depths))
            if not event["cut"] and drafted == start:
                tree.append(depths[-1] - start)
    hits = _hits(log_dir)
    stages = Stages(
        verify_ms=median_ms(verify),
        backup_ms=median_ms(backup),
        glue_ms=median_ms(glue),
        step_ms=median_ms(step),
        tree_ms=median_ms(tree) if len(tree) >= len(glue) * UNCUT_SHARE else None,
        backups=len(backup),
        hit_gap_us=statistics.median(hits.gaps) * 1e-3 if hits.gaps else None,
        hit_round_ms=median_ms(hits.rounds),
        hits=len(hits.lengths),
        hits_ready=len(hits.gaps),
        leased=hits.leased,
    )
    lengths = hits.lengths
    pass_ms, glue_ms, step_ms = stages.verify_ms, stages.glue_ms, stages.step_ms
    if lengths and pass_ms and glue_ms and step_ms:
        stages.cached_ms = statistics.fmean(max(pass_ms, glue_ms + n * step_ms) for n in lengths)
    return stages


class _Hits(NamedTuple):
    """Of single rows' rounds after outcomes that were cached.

    Attributes:
        gaps, rounds: their times (ns) where nobody waited for more of the chain.
        lengths: of the chains that all of them gave.
        leased: share of all steps that were leased, None without steps.
    """

    gaps: list[float]
    rounds: list[float]
    lengths: list[int]
    leased: float | None


def _hits(log_dir: Path) -> _Hits:
    cached = {
        event["step"]: (event["rows"][0]["chain"], bool(event.get("waited")))
        for event in events(log_dir / "scheduler.jsonl", "round")
        if len(event["rows"]) == 1 and event["rows"][0]["hit"]
    }
    steps = [e for e in events(log_dir / "target-0.jsonl", "verify") if e["tokens"] <= LONGEST]
    leased = sum(bool(step.get("leased")) for step in steps)
    found = _Hits([], [], [], leased / len(steps) if steps else None)
    for one, other in pairwise(steps):
        if one["step"] not in cached or other["step"] != one["step"] + 1:
            continue
        chain, waited = cached[one["step"]]
        if one["tokens"] != 1 + chain:
            continue  # a prompt was read
        found.lengths.append(other["tokens"] - 1)
        if not waited and not one.get("looks"):
            found.gaps.append(other["start"] - one["end"])
            found.rounds.append(other["start"] - one["start"])
    return found


def bound(row: Row, stages: Stages) -> float | None:
    """Tokens a second if nothing but the stages took time (Theorem 7 of arXiv 2603.03251): a
    round on a hit takes the longer of verification and of drafting the chain it verifies, one on a
    miss verification and its backup."""
    if not stages.verify_ms or not row.tokens_per_round:
        return None
    verify, backup = stages.verify_ms, stages.backup_ms or 0.0
    if row.hit_rate is None:
        return 1e3 * row.tokens_per_round / (verify + backup)
    cached = stages.cached_ms or max(verify, stages.tree_ms or 0.0)
    # Misses whose backup was free (prompt lookup) cost a verification alone.
    share = min(1.0, stages.backups / max(1.0, row.counters.get("misses", 0.0)))
    missed = verify + share * backup
    return 1e3 * row.tokens_per_round / (row.hit_rate * cached + (1 - row.hit_rate) * missed)


def events(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """Lines of a log with this event, in order; nothing where there is no such file."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        with suppress(msgspec.DecodeError):
            fields = msgspec.json.decode(line, type=dict[str, Any])
            if fields.get("event") == name:
                yield fields


def median_ms(values: Sequence[float]) -> float | None:
    """Median of nanoseconds, in ms; None without values."""
    return statistics.median(values) * 1e-6 if values else None
