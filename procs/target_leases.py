"""A lease on the target's side: launch verifications ahead, look at their records, stop in time."""

from __future__ import annotations

import time

from ipc.messages.target import StepPlan, StepResult
from ipc.round_records import ABORTED, DRAFTED, FOLLOWED, LATE, ROUNDS, Record, RoundRecords
from ipc.running_time import RunningTime
from procs.device_link import TargetLink
from procs.runtime import Runtime
from ssd_pipe.errors import ResourceError
from ssd_pipe.verification.verifier import Verifier

AHEAD = 2
"""Verifications on the GPU's queue, the running one included."""
STUCK = 60.0  # seconds a leased round may take
TURN = 0.1  # seconds between two looks at the world, when all is well; far less where it spins
LOOK_EVERY = 200
"""Looks at the records between two looks at the rest of the world."""


def run_lease(runtime: Runtime, verifier: Verifier, link: TargetLink, plan: StepPlan) -> StepResult:
    """Run the lease of ``plan`` to its end.

    Raises:
        RuntimeError: this target cannot take leases.
        ResourceError: the GPU took too long over a round.
    """
    lease, records = plan.lease, link.records
    if lease is None or records is None:
        raise RuntimeError("a lease for a target that cannot take one")
    started = time.monotonic_ns()
    graph = verifier.begin_lease(plan)
    link.set_clock()  # after that, for it waits for the GPU
    launched = done = 0
    ended = False
    watch = _Watch(runtime, records)
    while True:
        ended = ended or records.recalled == lease.first or watch.leaving
        if (
            not ended
            and launched < min(lease.rounds, done + AHEAD)
            and _room(records, lease.first + launched)
        ):
            graph.launch()
            launched += 1
            continue
        if done == launched and (ended or done == lease.rounds):
            break
        found = records.round(lease.first + done, len(plan.rows))
        if found is None:
            watch.look()
            continue
        watch.moved()
        live = [record for record in found if not record.idle]
        late = any(record.flags & (LATE | ABORTED) for record in live)
        ended = ended or late or all(record.finished for record in found)
        if late:
            runtime.log.warning("late draft", step=plan.step + done, aborted=records.aborted)
        if live:
            _log(runtime, plan.step + done, live, records.clock_ns)
        done += 1
    verifier.end_lease()
    finished = time.monotonic_ns()
    return StepResult(plan.step, [], started, finished, finished, rounds=done)


def _room(records: RoundRecords, number: int) -> bool:
    """Whether both followers have read what round ``number`` would overwrite."""
    read = min(records.progress(FOLLOWED), records.progress(DRAFTED))
    return number - read < ROUNDS


def _log(runtime: Runtime, step: int, live: list[Record], clock_ns: int) -> None:
    end = max(record.chosen for record in live) + clock_ns
    runtime.log.info(
        "verify",
        step=step,
        start=min(record.started for record in live) + clock_ns,
        forward=end,
        end=end,
        settled=max(record.settled for record in live) + clock_ns,
        looks=max(record.looks for record in live),
        rows=len(live),
        tokens=sum(1 + len(record.chain) for record in live),
        leased=True,
    )


class _Watch:
    """Looks after the process while records are awaited, now and then.

    Attributes:
        leaving: the process is to stop; no wait on the GPU goes on.
    """

    def __init__(self, runtime: Runtime, records: RoundRecords) -> None:
        self._runtime, self._records = runtime, records
        self._looks = 0
        self._clock = RunningTime(TURN)
        self._since = 0.0
        self.leaving = False

    def moved(self) -> None:
        """A round has ended."""
        self._since = self._clock.read()
        self._runtime.alive()

    def look(self) -> None:
        """Raises ResourceError if the round takes too long."""
        self._looks += 1
        if self._looks % LOOK_EVERY:
            return
        runtime = self._runtime
        runtime.alive()
        lost = runtime.link is not None and runtime.link.lost
        if runtime.stopping.is_set() or lost:
            self.leaving = True
            self._records.abort()
        if self._clock.read() - self._since > STUCK:
            self._records.abort()
            raise ResourceError(f"no leased round on the GPU ended within {STUCK:.0f} s")
