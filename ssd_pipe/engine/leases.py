"""Leases: rounds that run on the GPUs alone, with the scheduler one step behind.

When nothing but decoding is due, the scheduler gives the target leave for a number of rounds: KV
blocks for all of them, what ends each row, how long a cached chain may wait for more. Target and
draft then go on by themselves; each round leaves a record (``ipc.round_records``), and ``follow``
commits it just as if the step had come back the usual way: the same tokens, blocks, counters and
emissions. A row that ends within a lease is idle for the rest of it. The lease ends after its last
round, or a round or two after a recall, and the next step is planned as ever.

Pure, like the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ipc.messages.draft import DraftLease
from ipc.messages.target import Lease, RowLease, RowOutcome
from ipc.round_records import MAX_STOPS, Record
from ssd_pipe.config import SpeculationSection
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.engine.step import Emission, Step
from ssd_pipe.engine.synthetic import SyntheticOutcomes

MAX_ROUNDS = 64
MIN_ROUNDS = 2
PATIENCE_US = 1_000_000
"""A draft that is later has died, and the lease ends."""


@dataclass(slots=True)
class Leased:
    """A lease being followed.

    Attributes:
        step: the step it began with.
        requests: the leased rows, in the records' order.
        terms, draft: what target and draft were told.
        number: the round to follow next.
    """

    step: Step
    requests: list[Request]
    terms: Lease
    draft: DraftLease
    number: int


class Leases:
    """Grants leases and follows them."""

    def __init__(
        self,
        scheduler: Scheduler,
        planner: RoundPlanner,
        spec: SpeculationSection,
        synthetic: SyntheticOutcomes | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._planner = planner
        self._spec = spec
        self._synthetic = synthetic
        self._granted = 0

    def grant(self, step: Step) -> Leased | None:
        """A lease that begins with ``step``, with blocks for all its rounds; None if the step has
        other work than decoding, or rows that the GPU cannot judge alone."""
        requests = [row.request for row in step.rows]
        if len(step.decoding) < len(step.rows) or not all(map(leasable, requests)):
            return None
        rounds = self._affordable(requests)
        if rounds < MIN_ROUNDS:
            return None
        for request in requests:
            self._scheduler.blocks.ensure(request.table, self._reach(request, rounds))
        first = self._granted + 1
        self._granted += rounds
        policy = self._planner.lease_policy(len(requests))
        rows = [
            RowLease(
                prefix_hash=request.prefix_hash,
                left=request.room,
                stop_ids=sorted(request.stop_ids),
                draws=self._synthetic.draws(rounds, self._spec.k) if self._synthetic else [],
            )
            for request in requests
        ]
        terms = Lease(first, rounds, policy.waits, PATIENCE_US, PATIENCE_US, rows)
        draft = DraftLease(first, rounds, policy.backup, policy.always)
        return Leased(step, requests, terms, draft, first)

    def _affordable(self, requests: Sequence[Request]) -> int:
        """Rounds for which blocks can be set aside without crowding anyone out."""
        useful = max(request.room for request in requests)
        rounds = min(MAX_ROUNDS, useful)
        while rounds >= MIN_ROUNDS and not self._scheduler.blocks.can_set_aside(
            (r.table, self._reach(r, rounds)) for r in requests
        ):
            rounds //= 2
        return rounds

    def _reach(self, request: Request, rounds: int) -> int:
        """Positions that may be written in so many rounds."""
        return min(request.computed + rounds * (self._spec.k + 1), request.limit)

    def wants_back(self, leased: Leased) -> bool:
        """Whether someone waits for a place that a leased row has left."""
        return bool(self._scheduler.waiting) and any(r.slot < 0 for r in leased.requests)

    def waited(self, leased: Leased) -> bool:
        """Whether the round to follow began with a wait for backups."""
        return leased.number > leased.terms.first and self._planner.missed

    def follow(self, leased: Leased, records: Sequence[Record]) -> tuple[Step, list[Emission]]:
        """Commit a round; ``records`` are those of the leased rows, in order."""
        first = leased.number == leased.terms.first
        live = [
            (request, record)
            for request, record in zip(leased.requests, records, strict=True)
            if not record.idle
        ]
        requests = [request for request, _ in live]
        step = leased.step if first else self._scheduler.leased_step(requests)
        if not first:
            self._planner.round += 1
            self._planner.counters.steps_parallel += 1
            self._planner.follow_backups(requests, [r.chain for _, r in live], leased.draft)
        for request, record in live:
            request.chain = record.chain
        outcomes = [RowOutcome(record.accepted, record.token) for _, record in live]
        emissions = self._scheduler.apply(step, outcomes)
        for emission, (request, record) in zip(emissions, live, strict=True):
            self._planner.settle_found(emission, len(record.chain), record.next, record.entry)
            self._planner.conclude(emission)
            if not emission.finish:
                request.draft_length = len(request.tokens)
        leased.number += 1
        return step, emissions


def leasable(request: Request) -> bool:
    """Whether temperature and noise alone choose the request's tokens, and few ids end it."""
    key = request.key
    return (
        key.processors is None
        and request.logprobs < 0
        and not key.filtered
        and len(request.stop_ids) <= MAX_STOPS
    )
