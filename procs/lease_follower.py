"""Leases on the scheduler's side: grant them, follow their records, recall them in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ipc.doorbell import default_spin_us
from ipc.messages.target import StepResult
from ipc.round_records import FOLLOWED, LATE, Record, RoundRecords
from procs.draft_port import DRAFT
from procs.target_port import TargetPort
from procs.waiting import STUCK, Waiter
from ssd_pipe.engine.leases import Leased, Leases, leasable
from ssd_pipe.engine.round_times import RoundTimes
from ssd_pipe.engine.step import Emission, Step
from ssd_pipe.errors import PeerLost

ATTEND_EVERY = 50
"""Looks at the records between two looks at requests and peers."""
_NAP = 20e-6  # seconds between looks where cores are scarce

Tell = Callable[[Step, StepResult, list[int], list[Emission], tuple[int, int], float], None]
"""Passes on a round; see ``procs.scheduler``."""


def can_lease(facts: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether target and draft have said that they can; ``facts`` by process."""
    sides = [f for name, f in facts.items() if name == "target-0" or name.startswith("draft")]
    return len(sides) == 2 and all(side.get("leased_rounds") for side in sides)


class LeaseFollower:
    """The scheduler's part of every lease.

    Args:
        has_mail: whether the frontend has sent anything; a lease then ends.
        tell: passes on what a round gave.
    """

    def __init__(
        self,
        leases: Leases,
        records: RoundRecords,
        target: TargetPort,
        has_mail: Callable[[], bool],
        waiter: Waiter,
        times: RoundTimes,
        tell: Tell,
    ) -> None:
        self._leases, self._records = leases, records
        self._target, self._has_mail, self._waiter = target, has_mail, waiter
        self._times, self._tell = times, tell
        self._spins = default_spin_us() > 0
        self._last_settled = 0

    def takes(self, step: Step) -> bool:
        """Whether the rows of ``step`` may be leased, once they all decode."""
        return all(leasable(row.request) for row in step.rows)

    def grant(self, step: Step) -> Leased | None:
        """A lease that begins with ``step``, if it may."""
        leased = self._leases.grant(step)
        if leased is not None:
            self._last_settled = 0
            self._records.read(FOLLOWED, leased.terms.first - 1)
        return leased

    def follow(self, leased: Leased) -> tuple[int, bool]:
        """Until the lease has ended, or the process is to stop: the last round followed, and
        whether the draft was too late for one.

        Raises PeerLost.
        """
        records, first = self._records, leased.terms.first
        rows = len(leased.requests)
        end: int | None = None
        late = False
        looks, since = 0, self._waiter.now()
        while end is None or leased.number < end:
            found = records.round(leased.number, rows)
            if found is not None:
                late = late or any(record.flags & LATE for record in found)
                self._commit(leased, found)
                since = self._waiter.now()
                continue
            result = self._target.lease_end(leased.step.number)
            if result is not None:
                end = first + result.rounds
            looks += 1
            if not self._spins:
                time.sleep(_NAP)
            elif looks % ATTEND_EVERY:
                continue
            if not self._waiter.goes_on(since):
                if self._waiter.now() - since >= STUCK:
                    raise PeerLost(
                        f"target-0: no leased round ended within {STUCK:.0f} s", "target-0"
                    )
                break
            if self._waiter.absence(DRAFT):
                self._speak_for_draft(leased)
                records.recall(first)
            elif self._has_mail() or self._leases.wants_back(leased):
                records.recall(first)
        return leased.number - 1, late

    def _speak_for_draft(self, leased: Leased) -> None:
        """Let the round under way wait for nothing that a dead draft owes it."""
        for request in leased.requests:
            if request.slot >= 0:
                self._records.skip(request.slot, leased.number)
                self._records.answer(request.slot, leased.number - 1, [])

    def _commit(self, leased: Leased, found: list[Record]) -> None:
        live = [record for record in found if not record.idle]
        missed = self._leases.waited(leased)
        step, emissions = self._leases.follow(leased, found)
        self._records.read(FOLLOWED, leased.number - 1)
        if not live:
            return
        clock = self._records.clock_ns
        started = min(record.started for record in live) + clock
        chosen = max(record.chosen for record in live) + clock
        settled = max(record.settled for record in live) + clock
        if self._last_settled and missed:
            drafted = max(0, started - self._last_settled) * 1e-9
            self._times.backup_wait_seconds += self._times.waited(drafted)
        verified = [len(record.chain) for record in live]
        outcomes = [emission.outcome for emission in emissions]
        result = StepResult(step.number, outcomes, started, chosen, chosen)
        seconds = self._times.step(result, len(verified) + sum(verified))
        waited = any(record.looks for record in live)
        if waited:
            self._times.depth_wait_seconds += self._times.waited((settled - chosen) * 1e-9)
        self._last_settled = settled
        self._tell(step, result, verified, emissions, (chosen, settled if waited else 0), seconds)
