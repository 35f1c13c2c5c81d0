"""Going ahead: the target begins the next step by itself, and the scheduler follows.

While a step runs, the scheduler gives leave for the one after it (``messages.Ahead``): blocks, what
ends each row, how long chains may be. When the target knows the step's outcomes it looks them up in
the speculation cache, and if every row goes on with a chain it needs nobody: the next verification
starts at once, and the scheduler commits the last one meanwhile. Where the rows decode alone there
is not even anything to look up. Branches that are to be announced, or to grow, may be waited for
where that costs nobody anything. Otherwise the leave is void, and the next step is planned as ever.

Pure, like the scheduler. ``Aheads`` is its side, ``follow_on`` the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ipc.messages.target import Ahead, Found, RowAhead, RowOutcome, StepPlan, StepRow
from ipc.round_records import WAIT_BRANCHES
from ssd_pipe.config import SpeculationSection
from ssd_pipe.engine.ending import cut
from ssd_pipe.engine.partitioned_cache import PartitionedCache
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.engine.step import Step


class Growing(NamedTuple):
    """The next step follows once a cached chain has more tokens than it has now.

    Attributes:
        slot, entry: the chain.
        depth: tokens it has.
        last: one more is enough, although the draft would go on.
    """

    slot: int
    entry: int
    depth: int
    last: bool

    def lasts(self, cache: PartitionedCache) -> bool:
        """Whether it has no more tokens yet."""
        return cache.depth_of(self.slot, self.entry) == self.depth


class Unannounced(NamedTuple):
    """The next step follows if its outcome turns out to be among the branches to be announced.

    Attributes:
        slot, prefix_hash: what they are for.
    """

    slot: int
    prefix_hash: int

    @property
    def last(self) -> bool:
        """The draft is to go on."""
        return False

    def lasts(self, cache: PartitionedCache) -> bool:
        """Whether they have not been announced yet."""
        return not cache.announced(self.slot, self.prefix_hash)


Pending = Growing | Unannounced
"""What the draft is still about to do."""


class Aheads:
    """Gives leave, and plans the steps that were begun under it."""

    def __init__(
        self, scheduler: Scheduler, planner: RoundPlanner, spec: SpeculationSection
    ) -> None:
        self._scheduler = scheduler
        self._planner = planner
        self._spec = spec

    def offer(self, step: Step) -> Ahead | None:
        """Leave to go on after ``step``, which is under way, with blocks for it; None if the next
        step may have other work, or needs the scheduler whatever the outcomes are."""
        scheduler, planner = self._scheduler, self._planner
        requests = [row.request for row in step.rows]
        if (
            len(step.decoding) < len(step.rows)
            or len(scheduler.running) != len(step.rows)
            or scheduler.waiting
            or any(map(self._handed_over, requests))
        ):
            return None
        present = planner.effort
        if (present.k and present.alone) or planner.foresee(scheduler.load) != present:
            return None
        k = min(present.k, scheduler.longest_chain)
        reach = [min(r.limit, r.computed + len(r.chain) + k + 2) for r in requests]
        tables = zip((r.table for r in requests), reach, strict=True)
        if (present.k and not k) or not scheduler.blocks.can_set_aside(tables):
            return None
        rows = []
        for request, length in zip(requests, reach, strict=True):
            scheduler.blocks.ensure(request.table, length)
            blocks = request.table.blocks[request.announced :]
            stops = list(request.stop_ids)
            rows.append(RowAhead(request.prefix_hash, request.room, stops, blocks))
        # In a batch no row makes others wait.
        waits = planner.pace.lease_waits(k, 1) if k and len(requests) == 1 else 0
        return Ahead(step.number, k, waits, rows)

    def follow(self, step: Step, leave: Ahead) -> Step:
        """The step that the target has begun after ``step``, which is committed."""
        scheduler = self._scheduler
        requests = [row.request for row in step.rows]
        scheduler.lookahead = self._planner.decide(scheduler.load).k
        for request, row in zip(requests, leave.rows, strict=True):
            request.announced += len(row.blocks)
        return scheduler.leased_step(requests)

    def _handed_over(self, request: Request) -> bool:
        """Whether numbers would have to be agreed on for what its chains were drawn from."""
        return self._spec.rule == "rejection" and request.key.temperature > 0


def follow_on(
    leave: Ahead, plan: StepPlan, outcomes: Sequence[RowOutcome], cache: PartitionedCache | None
) -> tuple[StepPlan, list[Found]] | Pending | None:
    """The step after ``plan``, which gave ``outcomes``, and the chains it verifies.

    Pending if a chain is worth a wait; None if the step is the scheduler's to plan. Without a
    ``cache``, rows that need a chain are.
    """
    if leave.after != plan.step or not len(leave.rows) == len(plan.rows) == len(outcomes):
        return None
    rows, found = [], []
    pending: Pending | None = None
    for own, row, outcome in zip(leave.rows, plan.rows, outcomes, strict=True):
        accepted = outcome.accepted
        first = len(row.tokens) - row.chain
        tokens, finish = cut(
            [*row.tokens[first : first + accepted], outcome.token], own.left, own.stop_ids
        )
        if outcome.failure or finish:
            return None
        chain, entry = [], -1
        if leave.k:
            room = min(leave.k, own.left - len(tokens) - 1)
            if cache is None or room < 1:
                return None
            late = Unannounced(row.slot, own.prefix_hash)
            missing = late.lasts(cache)  # before the lookup: what is announced after is looked up
            hit = cache.lookup(row.slot, own.prefix_hash, accepted, outcome.token)
            if hit is None:
                return late if missing and leave.waits & WAIT_BRANCHES else None
            goal = min(room, cache.goal_of(row.slot, hit.entry))
            if hit.depth < goal and leave.waits >> hit.depth & 1:
                more = hit.depth + 1
                last = more < goal and not leave.waits >> more & 1
                pending = Growing(row.slot, hit.entry, hit.depth, last)
            elif not hit.tokens:
                return None
            chain, entry = hit.tokens[:room], hit.entry
        rows.append(
            StepRow(
                slot=row.slot,
                start=row.start + first + accepted,
                tokens=[outcome.token, *chain],
                chain=len(chain),
                sample=True,
                blocks=own.blocks,
            )
        )
        found.append(Found(chain, entry))
    if pending is not None:
        return pending
    return StepPlan(plan.step + 1, rows, alone=plan.alone), found
