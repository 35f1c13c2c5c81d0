"""Where the time of rounds went, stage by stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ssd_pipe.trace.timeline import Round, TimeLine

NS_TO_MS = 1e-6
VERIFICATION, OVERHEAD, DRAFT = "verification", "overhead", "draft round"
ORDER = (
    VERIFICATION,
    "forward pass",
    "judging",
    "wait for depth",
    "wait for backup",
    OVERHEAD,
    "outcome -> query",
    "planning",
    "plan -> target",
    "query -> next verification",
    "plan -> draft",
    DRAFT,
    "backup",
    "glue",
)
"""Stages as a table lists them; the depths of the tree come last."""


class Kind(NamedTuple):
    """``part_of``: the stage whose time it is a part of. ``beside``: the draft does it meanwhile,
    so it takes no time of a round."""

    name: str
    part_of: str = ""
    beside: bool = False


class Stage(msgspec.Struct, frozen=True):
    """How long one stage took; see Kind.

    Attributes:
        count: times it happened.
        p50, p99, max: milliseconds.
        share: its time by that of all rounds. What is neither part of another stage nor beside
            the round adds up to 1.
    """

    name: str
    part_of: str
    beside: bool
    count: int
    p50: float
    p99: float
    max: float
    share: float


class Summary(msgspec.Struct, frozen=True):
    """A run in numbers; rates are None where nothing happened that could have one.

    Attributes:
        rounds: decoding rounds that another one follows at once: those measured.
        round_ms: from the start of a verification to that of the next, median.
        tokens_a_round: tokens emitted by sequence and round.
        hit_rate: share of the outcomes that were in the speculation cache.
        hidden: share of the draft's working time during which the target verified.
        unreadable: log lines left out.
    """

    run: str
    mode: str
    rounds: int
    round_ms: float | None
    tokens_a_round: float | None
    hit_rate: float | None
    hidden: float | None
    stages: list[Stage]
    unreadable: int = 0


def summarise(line: TimeLine) -> Summary:
    """The stages of a run's decoding rounds; steps that read prompts are left out."""
    samples: dict[Kind, list[int]] = defaultdict(list)
    measured = list(line.steps())
    for current, following in measured:
        for kind, duration in _samples(current, following):
            samples[kind].append(duration)
    cycles = [following.start - current.start for current, following in measured]
    rounds = [current for current, _ in measured]
    outcomes = [outcome for each in rounds for outcome in each.outcomes]
    hits, misses = sum(r.hits for r in rounds), sum(r.misses for r in rounds)
    return Summary(
        run=line.name,
        mode=line.mode,
        rounds=len(rounds),
        round_ms=float(np.median(cycles)) * NS_TO_MS if cycles else None,
        tokens_a_round=sum(o.k + 1 for o in outcomes) / len(outcomes) if outcomes else None,
        hit_rate=hits / (hits + misses) if hits + misses else None,
        hidden=_hidden(rounds),
        stages=[_stage(kind, samples[kind], sum(cycles)) for kind in sorted(samples, key=_place)],
        unreadable=line.unreadable,
    )


def _samples(current: Round, following: Round) -> Iterator[tuple[Kind, int]]:
    """Nanoseconds between the starts of two verifications, and of the draft's work meanwhile."""
    yield Kind(VERIFICATION), current.end - current.start
    for done in current.verifications[:1]:
        if done.forward:
            yield Kind("forward pass", VERIFICATION), done.forward - done.start
            yield Kind("judging", VERIFICATION), done.end - done.forward
    yield from _between(current, following)
    for draft in current.drafts:
        if current.sent and draft.start > current.sent and not draft.drafted_just_in_time:
            yield Kind("plan -> draft", beside=True), draft.start - current.sent
        yield Kind(DRAFT, beside=True), draft.end - draft.start
        for name, start, end in draft.passes():
            yield Kind(name, DRAFT, beside=True), end - start


def _between(current: Round, following: Round) -> Iterator[tuple[Kind, int]]:
    """From an outcome to the start of the next verification."""
    if not current.query or not following.sent:
        if current.query:
            yield Kind("outcome -> query"), current.query - current.end
        yield Kind("query -> next verification"), following.start - (current.query or current.end)
        return
    waits = 0
    if current.waited:
        waits = current.waited - current.query
        yield Kind("wait for depth"), waits
    planning = following.sent - (current.waited or current.query)
    if following.backups:
        waits += planning
        yield Kind("wait for backup"), planning
    else:
        yield Kind("planning", OVERHEAD), planning
    yield Kind("outcome -> query", OVERHEAD), current.query - current.end
    yield Kind("plan -> target", OVERHEAD), following.start - following.sent
    yield Kind(OVERHEAD), following.start - current.end - waits


def _hidden(rounds: Sequence[Round]) -> float | None:
    """Share of the drafts' time that lies within a verification."""
    spans = [(r.start, r.end) for r in rounds]
    work = [(d.start, d.end) for r in rounds for d in r.drafts]
    total = sum(end - start for start, end in work)
    if not total:
        return None
    starts = np.array([start for start, _ in spans])
    covered = 0
    for start, end in work:
        first = max(0, int(np.searchsorted(starts, start, "right")) - 1)
        for begun, ended in spans[first:]:
            if begun >= end:
                break
            covered += max(0, min(end, ended) - max(start, begun))
    return covered / total


def _place(kind: Kind) -> tuple[int, int]:
    if kind.name in ORDER:
        return ORDER.index(kind.name), 0
    return len(ORDER), int(kind.name.removeprefix("depth "))


def _stage(kind: Kind, durations: list[int], whole: int) -> Stage:
    milliseconds = np.array(durations) * NS_TO_MS
    return Stage(
        *kind,
        count=len(durations),
        p50=float(np.median(milliseconds)),
        p99=float(np.percentile(milliseconds, 99)),
        max=float(milliseconds.max()),
        share=sum(durations) / whole if whole else 0.0,
    )
