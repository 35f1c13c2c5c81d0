"""One time line out of the logs of several processes: rounds, and what each process did in them.

Times are CLOCK_MONOTONIC nanoseconds; 0 stands for a stamp that nobody logged. A round is one
target step. It is put together by its step number (scheduler, targets) and the number of the draft
round planned with it, so it lacks only what the process that is missing would have told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ssd_pipe.trace.reading import SCHEDULER, Event, RunLogs

ENDINGS = {"finish", "failed", "abort"}
"""Events of the scheduler after which a request is gone."""


@dataclass(frozen=True, slots=True)
class Verification:
    """A target rank's part of a step: ``tokens`` fed in ``rows`` sequences."""

    process: str
    step: int
    start: int
    forward: int
    end: int
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One sequence's outcome (``k``, ``token``).

    ``hit``: the cache had it, with ``ready`` tokens; None where nothing was looked up, as for a
    request's last outcome.
    """

    rid: int
    k: int
    token: int
    hit: bool | None
    ready: int


@dataclass(frozen=True, slots=True)
class DraftRound:
    """A draft process's round; see ``procs.draft``. ``cut``: the next outcome ended it."""

    process: str
    number: int
    start: int
    backup: int
    glue: int
    depths: tuple[int, ...]
    end: int
    rids: tuple[int, ...]
    branches: int
    cut: bool

    def passes(self) -> list[tuple[str, int, int]]:
        """(stage, start, end) of each stage that it reached, in order."""
        stages = []
        now = self.start
        for name, end in (
            ("backup", self.backup),
            ("glue", self.glue),
            *((f"depth {i}", end) for i, end in enumerate(self.depths, 1)),
        ):
            if end > now:
                stages.append((name, now, end))
                now = end
        return stages

    @property
    def drafted_just_in_time(self) -> bool:
        return self.backup > self.start


@dataclass(slots=True)
class Round:
    """One target step and everything that belongs to it.

    Attributes:
        sent: the plan went to the target.
        query: the outcomes have been looked up in the speculation cache.
        waited: the wait for a deeper chain was over; 0 if there was none.
        decoding: every row continues an answer; False for steps that read prompts.
        idle_after: no request was left when it ended.
    """

    step: int
    plan: int = 0
    sent: int = 0
    start: int = 0
    end: int = 0
    query: int = 0
    waited: int = 0
    verifications: list[Verification] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    drafts: list[DraftRound] = field(default_factory=list)
    decoding: bool = False
    idle_after: bool = False

    @property
    def hits(self) -> int:
        return sum(o.hit is True for o in self.outcomes)

    @property
    def misses(self) -> int:
        return sum(o.hit is False for o in self.outcomes)

    @property
    def backups(self) -> bool:
        """The target waited for chains made just in time."""
        return any(draft.drafted_just_in_time for draft in self.drafts)


@dataclass(slots=True)
class TimeLine:
    """Rounds in order, and the processes that were there.

    Attributes:
        name: of the run.
        mode: "ar", "sd" or "ssd", as the logs show it.
        processes: names, the scheduler first, then targets, drafts, others.
        pids: by process, where told.
        marks: single events (process, time, text) such as a request's arrival.
        unreadable: log lines left out.
    """

    name: str
    mode: str
    processes: list[str]
    pids: dict[str, int]
    rounds: list[Round]
    marks: list[tuple[str, int, str]]
    unreadable: int = 0

    def steps(self) -> Iterator[tuple[Round, Round]]:
        """Decoding rounds and the step after each, where work went on without a pause."""
        for current, following in pairwise(self.rounds):
            consecutive = following.step == current.step + 1 and current.start and following.start
            if current.decoding and following.decoding and consecutive and not current.idle_after:
                yield current, following

    @property
    def drafts(self) -> list[DraftRound]:
        return [draft for r in self.rounds for draft in r.drafts]


def join(logs: RunLogs) -> TimeLine:
    """Put the logs of a run together. Raises nothing for what is missing or incomplete."""
    rounds: dict[int, Round] = {}
    _read_scheduler(logs.events.get(SCHEDULER, []), rounds)
    for name, events in logs.events.items():
        if name.startswith("target"):
            _read_target(name, events, rounds)
    drafts: dict[int, list[DraftRound]] = defaultdict(list)
    for name, events in logs.events.items():
        if name.startswith("draft"):
            for draft in _draft_rounds(name, events):
                drafts[draft.number].append(draft)
    ordered = [rounds[step] for step in sorted(rounds)]
    for each in ordered:
        each.drafts = drafts.get(each.plan, []) if each.plan else []
    mode = _mode(ordered)
    if mode != "ssd":  # there is no cache to hit
        for each in ordered:
            each.outcomes = [replace(outcome, hit=None) for outcome in each.outcomes]
    return TimeLine(
        logs.name,
        mode,
        sorted(logs.events, key=_rank),
        {name: events[0]["pid"] for name, events in logs.events.items() if "pid" in events[0]},
        ordered,
        _marks(logs),
        logs.unreadable,
    )


def _read_scheduler(events: list[Event], rounds: dict[int, Round]) -> None:
    """Its round lines, and from the events between them when nobody was there."""
    current = Round(0)
    there: set[int] = set()
    seen: set[int] = set()
    for event in events:
        kind = event["event"]
        if kind == "add":
            there.add(event.get("rid", -1))
        elif kind in ENDINGS:
            there.discard(event.get("rid", -1))
            if kind == "abort":  # the others come before the line of the round that they end in
                current.idle_after = current.idle_after or not there
        elif kind == "round" and _whole(event, "step", "rows"):
            current = _round_of(event)
            current.idle_after = not there
            rids = {outcome.rid for outcome in current.outcomes}
            current.decoding = bool(rids) and rids <= seen
            seen |= rids
            rounds[current.step] = current


def _round_of(event: Event) -> Round:
    return Round(
        step=event["step"],
        plan=event.get("plan", 0),
        sent=event.get("sent", 0),
        start=event.get("start", 0),
        end=event.get("end", 0),
        query=event.get("query", 0),
        waited=event.get("waited", 0),
        outcomes=[
            Outcome(row["rid"], row["k"], row["token"], row.get("hit"), row.get("ready", 0))
            for row in event["rows"]
            if _whole(row, "rid", "k", "token")
        ],
    )


def _read_target(name: str, events: list[Event], rounds: dict[int, Round]) -> None:
    for event in events:
        if event["event"] != "verify" or not _whole(event, "step", "start", "end"):
            continue
        step, start, end = event["step"], event["start"], event["end"]
        rows = event.get("rows", 0)
        done = Verification(
            name, step, start, event.get("forward", 0), end, rows, event.get("tokens", 0)
        )
        # Without the scheduler's line nothing tells prompts apart from answers.
        this = rounds.setdefault(step, Round(step, start=start, end=end, decoding=True))
        this.verifications.append(done)
        this.decoding = this.decoding and (not this.query or rows == len(this.outcomes))


def _draft_rounds(name: str, events: list[Event]) -> Iterator[DraftRound]:
    for event in events:
        if event["event"] == "draft" and _whole(event, "round", "start", "end"):
            start: int = event["start"]
            yield DraftRound(
                name,
                event["round"],
                start,
                event.get("backup", start),
                event.get("glue", start),
                tuple(event.get("depths", ())),
                event["end"],
                tuple(event.get("rids", ())),
                event.get("branches", 0),
                bool(event.get("cut")),
            )


def _mode(rounds: list[Round]) -> str:
    drafts = [draft for each in rounds for draft in each.drafts]
    if any(draft.depths or draft.glue > draft.backup for draft in drafts):
        return "ssd"
    return "sd" if drafts else "ar"


def _marks(logs: RunLogs) -> list[tuple[str, int, str]]:
    told = {"add", "request", "done", *ENDINGS}
    return [
        (name, event["t"], f"{event['event']} {event['rid']}")
        for name, events in logs.events.items()
        for event in events
        if event["event"] in told and "rid" in event
    ]


def _rank(process: str) -> tuple[int, str]:
    order = ("frontend", "gateway", "scheduler", "target", "draft")
    role = process.partition("-")[0]
    return (order.index(role) if role in order else len(order), process)


def _whole(event: Event, *names: str) -> bool:
    return all(name in event for name in names)
