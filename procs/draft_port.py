"""The scheduler's side of the draft: plans out, notices back, the waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ipc.channel import TypedReceiver, TypedSender
from ipc.doorbell import default_spin_us
from ipc.messages import DepthReady, DraftNotice, DraftPlan, DraftTimes
from ipc.segments import open_segment
from procs import channels
from procs.runtime import Runtime
from procs.waiting import Waiter
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.round_times import RoundTimes
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.speculation_cache import SpeculationCache, size_bytes

DEPTH_POLL = 0.005  # seconds; bounds the loss where the draft misses that someone waits


class DraftPort:
    """Opens the channels; the draft may come later."""

    def __init__(
        self, runtime: Runtime, sizes: Dimensions, waiter: Waiter, times: RoundTimes
    ) -> None:
        self._runtime = runtime
        self._sizes = sizes
        self._waiter = waiter
        self._times = times
        self._plans: TypedSender[DraftPlan] = TypedSender.open(
            runtime, channels.DRAFT_PLANS, DraftPlan, capacity=sizes.plan_bytes
        )
        self._notices: TypedReceiver[DraftNotice] = TypedReceiver.open(
            runtime, channels.DRAFT_NOTICES, DraftNotice, spin_us=default_spin_us()
        )

    def map_cache(self) -> SpeculationCache:
        """The speculation cache, once the draft is ready and has made it."""
        sizes = self._sizes
        shape = (sizes.slots, sizes.branches, sizes.k)
        segment = open_segment(
            self._runtime.rundir.segment("speculation-cache"), size_bytes(*shape)
        )
        return SpeculationCache(segment, *shape, create=False, vocab_size=sizes.vocab_size)

    def send(self, plan: DraftPlan) -> None:
        """Give the draft its part of a step, if it has one."""
        if plan.rows or plan.begin or plan.drop:
            self._plans.send(plan)

    # ------------------------------------------------------------ waiting

    def backups(
        self,
        planner: RoundPlanner,
        waiting: Mapping[int, Request],
        backups: Mapping[int, int],
        meanwhile: Callable[[], None],
    ) -> bool:
        """Wait for the chains the current draft round makes just in time; False when stopping.

        Args:
            waiting: requests by slot.
            backups: tokens asked for, by slot.
            meanwhile: what can be done while the draft works.
        """
        pending = set(backups)
        started = time.monotonic()
        meanwhile()

        def take(notice: DraftNotice) -> bool:
            if isinstance(notice, DraftTimes):
                self._learn(planner, notice)
            elif isinstance(notice, DepthReady):
                pass  # of a wait that is over
            elif notice.round == planner.round and notice.slot in pending:
                pending.discard(notice.slot)
                planner.take_backup(waiting[notice.slot], notice)
            return not pending

        if self._waiter.message(self._notices, "backup chain from the draft", take) is None:
            return False
        seconds = self._times.waited(time.monotonic() - started)
        self._times.backup_wait_seconds += seconds
        # Before a request's second token, the draft may have had its prompt to read first.
        if all(len(waiting[slot].tokens) > waiting[slot].prompt_len + 1 for slot in backups):
            planner.times.observe("backup_step", seconds / max(backups.values()))
        return True

    def depth(self, planner: RoundPlanner, request: Request, batch: int) -> int:
        """Let a hit grow while that pays; returns when the wait was over, 0 if there was none.

        The time is CLOCK_MONOTONIC in ns.
        """
        if not planner.worth_waiting(request, batch):
            return 0
        started = time.monotonic()
        planner.announce_wait(True)
        try:
            while planner.worth_waiting(request, batch):
                if not planner.deepen(request):
                    notice = self._notices.recv(DEPTH_POLL)
                    if isinstance(notice, DraftTimes):
                        self._learn(planner, notice)
                        if notice.round == planner.round:
                            planner.deepen(request)
                            break  # the draft has done what it will do
                if not self._waiter.goes_on(started):
                    return 0
        finally:
            planner.announce_wait(False)
        self._times.depth_wait_seconds += self._times.waited(time.monotonic() - started)
        return time.monotonic_ns()

    def drain(self, planner: RoundPlanner) -> None:
        """Learn from what the draft has said meanwhile."""
        while (notice := self._notices.recv(0)) is not None:
            if isinstance(notice, DraftTimes):
                self._learn(planner, notice)

    def _learn(self, planner: RoundPlanner, times: DraftTimes) -> None:
        self._times.draft_busy_seconds += (times.finished_ns - times.started_ns) * 1e-9
        if times.steps:
            seconds = (times.tree_ns - times.glue_ns) * 1e-9 / times.steps
            planner.times.observe("step", seconds)
            planner.times.observe("glue", (times.glue_ns - times.backup_ns) * 1e-9)
