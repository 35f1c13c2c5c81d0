"""Chrome's trace format: a track per process, arrows for each round. Perfetto reads it.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ssd_pipe.errors import ResourceError
from ssd_pipe.trace.reading import SCHEDULER
from ssd_pipe.trace.timeline import DraftRound, Round, TimeLine

TraceEvent = dict[str, Any]
MAIN = 1
"""Thread number of a process's own stages; others are for kernels."""


def write_chrome(path: Path, line: TimeLine, kernels: Iterable[TraceEvent] = ()) -> None:
    """Write the time line, and ``kernels`` (of ``kernels.read_kernels``), as one JSON file.

    Raises ResourceError if that cannot be done.
    """
    events = [*Tracks(line).events(), *kernels]
    content = msgspec.json.encode(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": line.name}}
    )
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}") from None


def origin(line: TimeLine) -> int:
    """The time, in ns, that a trace counts from: the first thing that happened."""
    times = [t for r in line.rounds for t in (r.sent, r.start) if t]
    return min([*times, *(draft.start for draft in line.drafts)], default=0)


def process_ids(line: TimeLine) -> dict[str, int]:
    """Numbers of the tracks: process ids where they are known and differ."""
    known = line.pids
    if len(known) == len(line.processes) == len(set(known.values())):
        return dict(known)
    return {name: i for i, name in enumerate(line.processes, 1)}


class Tracks:
    """Turns a time line into trace events; times are microseconds from ``origin``."""

    def __init__(self, line: TimeLine) -> None:
        self._line = line
        self._origin = origin(line)
        self._pids = process_ids(line)

    def events(self) -> Iterator[TraceEvent]:
        """Track names, slices, instants, arrows."""
        for order, name in enumerate(self._line.processes):
            yield self._meta(name, "process_name", name=name)
            yield self._meta(name, "process_sort_index", sort_index=order)
            yield self._meta(name, "thread_name", name="stages")
        previous: Round | None = None
        for each in self._line.rounds:
            yield from self._round(previous, each)
            previous = each
        for process, time, text in self._line.marks:
            yield self._event(process, "i", text, time) | {"s": "p"}

    def _round(self, previous: Round | None, this: Round) -> Iterator[TraceEvent]:
        for done in this.verifications:
            args = {"step": done.step, "rows": done.rows, "tokens": done.tokens}
            yield self._slice(done.process, f"verify {done.step}", done.start, done.end, args)
            if done.forward:
                yield self._slice(done.process, "forward", done.start, done.forward)
                yield self._slice(done.process, "judge", done.forward, done.end)
        for draft in this.drafts:
            yield from self._draft(draft)
        if SCHEDULER in self._pids:
            yield from self._scheduler(previous, this)
            yield from self._arrows(this)

    def _draft(self, draft: DraftRound) -> Iterator[TraceEvent]:
        args = {"branches": draft.branches, "requests": list(draft.rids), "cut": draft.cut}
        name = f"draft {draft.number}"
        yield self._slice(draft.process, name, draft.start, draft.end, args)
        for stage, start, end in draft.passes():
            yield self._slice(draft.process, stage, start, end)

    def _scheduler(self, previous: Round | None, this: Round) -> Iterator[TraceEvent]:
        if this.sent:
            if previous is not None and previous.query and not previous.idle_after:
                begin = previous.waited or previous.query
                name = "wait for backup" if this.backups else "plan"
                yield self._slice(SCHEDULER, name, begin, this.sent, {"step": this.step})
            yield self._slice(SCHEDULER, f"round {this.step}", this.sent, this.end)
        if this.query:
            yield self._slice(SCHEDULER, "query", this.end, this.query, {"outcomes": _told(this)})
        if this.waited:
            yield self._slice(SCHEDULER, "wait for depth", this.query, this.waited)

    def _arrows(self, this: Round) -> Iterator[TraceEvent]:
        """plan -> verification and draft round, outcome -> query, published depth -> hit."""
        if this.sent:
            for done in this.verifications:
                yield from self._arrow("plan", this, SCHEDULER, this.sent, done.process, done.start)
            for draft in this.drafts:
                if not draft.drafted_just_in_time:
                    yield from self._arrow(
                        "draft plan", this, SCHEDULER, this.sent, draft.process, draft.start
                    )
        if not this.query:
            return
        for done in this.verifications[:1]:
            yield from self._arrow("outcome", this, done.process, done.end, SCHEDULER, this.end)
        ready = max((o.ready for o in this.outcomes if o.hit), default=0)
        taken = this.waited or this.query
        for draft in this.drafts:
            reached = [depth for depth in draft.depths[:ready] if depth <= taken]
            if reached:
                yield from self._arrow("hit", this, draft.process, reached[-1], SCHEDULER, taken)

    def _arrow(
        self, name: str, this: Round, source: str, start: int, sink: str, end: int
    ) -> Iterator[TraceEvent]:
        if source not in self._pids or sink not in self._pids:
            return
        shared = {"cat": name, "id": f"{name} {this.step} {sink}"}
        # An arrow hangs on the slice that covers its end; "e" lets it end where a slice begins.
        yield self._event(source, "s", name, start) | shared
        yield self._event(sink, "f", name, max(start, end)) | shared | {"bp": "e"}

    def _slice(
        self, process: str, name: str, start: int, end: int, args: TraceEvent | None = None
    ) -> TraceEvent:
        duration = max(0, end - start) / 1000
        return self._event(process, "X", name, start) | {"dur": duration, "args": args or {}}

    def _event(self, process: str, kind: str, name: str, time: int) -> TraceEvent:
        at = (time - self._origin) / 1000
        return {"ph": kind, "name": name, "pid": self._pids[process], "tid": MAIN, "ts": at}

    def _meta(self, process: str, kind: str, **args: Any) -> TraceEvent:
        return {"ph": "M", "name": kind, "pid": self._pids[process], "tid": MAIN, "args": args}


def _told(this: Round) -> list[TraceEvent]:
    return [
        {"request": o.rid, "accepted": o.k, "token": o.token, "hit": o.hit, "ready": o.ready}
        for o in this.outcomes
    ]
