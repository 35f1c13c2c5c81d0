"""Where a draft worker's next plan comes from: the scheduler or, under a lease, the records."""

from __future__ import annotations

import time
from collections.abc import Callable

from ipc.channel import TypedReceiver
from ipc.messages.draft import DraftPlan
from procs.liveness import StopFlag
from ssd_pipe.drafting.leased import RecordPlans
from ssd_pipe.errors import PeerLost

PLAN_SECONDS = 1e-3  # what the scheduler's next plan may take once it wants no more depths


class PlanInbox:
    """Every plan is taken here, in one order, whoever asks: of a lease, all records that the
    scheduler has seen come before the plan it sends when the lease is over.

    Args:
        plans: what the scheduler sends.
        stopping: ends every wait.
        apply: takes in a plan whose round is past.
        leased: what follows leases, None where there are none.
        look: called whenever records are looked for.
    """

    def __init__(
        self,
        plans: TypedReceiver[DraftPlan],
        stopping: StopFlag,
        apply: Callable[[DraftPlan], None],
        leased: RecordPlans | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._plans = plans
        self._stopping = stopping
        self._apply = apply
        self._leased = leased
        self._look = look
        self._held: DraftPlan | None = None
        self._begun = False

    def take_up(self, plan: DraftPlan) -> None:
        """Apply a plan and follow the lease that it brings, if any."""
        self._apply(plan)
        if plan.lease is not None and self._leased is not None:
            self._leased.begin(plan)

    def next(self, timeout: float) -> DraftPlan | None:
        """The next plan, None if there is none within ``timeout`` seconds.

        The plan before it must have been taken up. Raises PeerLost if records are missing that
        the scheduler has seen.
        """
        plan = self.take_held()
        if plan is not None:
            return plan
        leased = self._leased
        if leased is None or leased.over:
            return self._receive(timeout)
        end = time.monotonic() + timeout
        while True:
            self._look()
            plan = leased.take()
            if plan is None:
                plan = self._receive(0)
                if plan is not None:
                    self._read_rest(leased, plan.read)
            if plan is not None or time.monotonic() >= end or self._stopping.is_set():
                return plan

    def interrupted(self) -> bool:
        """Whether another plan has come; it is kept for ``next`` or ``take_held``."""
        self._held = self.next(0)
        return self._held is not None

    def take_held(self) -> DraftPlan | None:
        """The plan that ``interrupted`` kept, if it has not been taken yet."""
        plan, self._held = self._held, None
        return plan

    def last_call(self, reader_waits: Callable[[], bool], seconds: float) -> DraftPlan | None:
        """The next plan, if whoever waited for a depth wants no more of them within ``seconds``.

        A pass that has begun on a GPU cannot be taken back, and the next round waits for its end.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not reader_waits():
                return self.next(PLAN_SECONDS)
        return None

    def _read_rest(self, leased: RecordPlans, last: int) -> None:
        """The lease has ended: take in the records up to round ``last``."""
        while leased.number <= last:
            plan = leased.take()
            if plan is None:
                raise PeerLost(f"the records of round {leased.number} are missing")
            self._apply(plan)
        leased.end()

    def _receive(self, timeout: float) -> DraftPlan | None:
        """The scheduler's. What comes before the first fresh one was meant for a predecessor."""
        plan = self._plans.recv(timeout)
        self._begun = self._begun or (plan is not None and plan.fresh)
        return plan if self._begun else None
