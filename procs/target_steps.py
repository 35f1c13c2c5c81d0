"""Steps on the target's side: those that are planned, and those it goes on to by itself."""

from __future__ import annotations

import time
import zlib

from msgspec.structs import replace

from ipc.channel import TypedReceiver, TypedSender
from ipc.messages.target import Ahead, Found, StepPlan, StepResult
from procs.cache_map import map_cache
from procs.placement import Threads
from procs.profiling import StepProfiler
from procs.runtime import Runtime
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.engine.ahead import Pending, follow_on
from ssd_pipe.engine.partitioned_cache import PartitionedCache
from ssd_pipe.verification.verifier import Verifier

UNTOLD = 16
"""Steps in a row, begun without waiting, after which their lines go to the log all the same."""
PATIENCE_NS = 5_000_000
"""How long branches are waited for that are not announced, or not deep enough, yet. A draft that
takes longer may be in trouble, which the scheduler would see."""


class TargetSteps:
    """Runs steps on one rank.

    Args:
        results: None on ranks other than 0.
        spins: there is a core to look with, again and again, for what a cached chain still lacks.
    """

    def __init__(
        self,
        runtime: Runtime,
        sizes: Dimensions,
        verifier: Verifier,
        plans: TypedReceiver[StepPlan | Ahead],
        results: TypedSender[StepResult] | None,
        threads: Threads,
        profiler: StepProfiler,
        spins: bool = False,
    ) -> None:
        self._runtime = runtime
        self._sizes = sizes
        self._verifier = verifier
        self._plans = plans
        self._results = results
        self._threads = threads
        self._profiler = profiler
        self._spins = spins
        self._cache: PartitionedCache | None = None
        self._next: StepPlan | None = None
        self._leave: Ahead | None = None
        self._queued_ns = 0  # when the step to run next was queued, 0 if it is not
        self._begun = False  # the step after the present one is queued, under ``_leave``
        self._untold: list[tuple[StepPlan, StepResult]] = []

    def run(self, plan: StepPlan) -> StepPlan | None:
        """Run a step and tell what it gave, then the next ones as far as there is leave; returns a
        plan that begins a lease, if one came."""
        following: StepPlan | None = plan
        while following is not None and following.lease is None:
            plan = following
            self._runtime.alive()
            self._threads.use(plan.alone)
            with self._profiler.step(f"verify {plan.step}"):
                result = self._execute(plan)
            following, result = self._go_on(plan, result)
            # A draft waits for the outcome; where there is none, the GPU's next step comes first,
            # and so it does where it is launched and takes but a moment to begin.
            first = following is not None and (
                self._verifier.gated or not any(row.chain for row in following.rows)
            )
            if first:
                self._queue(following, result)
            if self._cache is not None:
                self._cache.reader_waits = False
            if self._results is not None:
                self._results.send(result)
            if not first:
                self._queue(following, result)
            self._untold.append((plan, result))
            # A line costs more than all else between two steps.
            if following is None or following.lease or len(self._untold) == UNTOLD:
                self._tell()
        return following

    def _execute(self, plan: StepPlan) -> StepResult:
        self._begun, self._leave = False, None
        started = self._queued_ns or time.monotonic_ns()
        self._queued_ns = 0
        verified = self._verifier.run(plan, lambda: self._meanwhile(plan))
        finished = time.monotonic_ns()
        started = verified.mailed_ns or started
        return StepResult(plan.step, verified.outcomes, started, verified.forward_ns, finished)

    def _queue(self, following: StepPlan | None, result: StepResult) -> None:
        """Have the GPU begin the next step."""
        if following is None or following.lease is not None:
            return
        now = result.finished_ns if self._begun else time.monotonic_ns()
        self._queued_ns = now if self._verifier.queue(following, self._begun) else 0

    def _meanwhile(self, plan: StepPlan) -> None:
        """While a step runs on a GPU: with leave, queue the next one behind it."""
        if not self._begun and self._plans.waiting():
            self._hear()
            leave = self._leave
            queued = leave is not None and self._verifier.go_on(plan, leave)
            self._begun = queued and not self._verifier.gated

    def _hear(self) -> None:
        """What the scheduler has said; the last of leaves and withdrawals counts."""
        while self._next is None and self._plans.waiting():
            message = self._plans.recv(0)
            if isinstance(message, StepPlan):
                self._next = message
            elif message is not None:
                self._leave = message

    def _go_on(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan | None, StepResult]:
        """The next step, None if it is the scheduler's to plan; the result says so too."""
        if not self._begun:  # else withdrawal comes too late
            self._hear()
        leave = self._leave
        if self._next is not None or leave is None or self._runtime.stopping.is_set():
            return self._planned(result)
        if leave.k and self._cache is None:
            # To give leave, the scheduler has found the draft ready.
            self._cache = map_cache(self._runtime, self._sizes)
        found = follow_on(leave, plan, result.outcomes, self._cache)
        looked_up = result.finished_ns if self._begun else time.monotonic_ns()
        if isinstance(found, Pending) and self._spins:
            found = self._await(found, plan, result)
            result = replace(result, looked_up_ns=looked_up, waited_ns=time.monotonic_ns())
        if found is None or isinstance(found, Pending):
            return self._planned(result)
        following, chains = found
        return following, replace(result, found=chains, looked_up_ns=looked_up)

    def _await(
        self, pending: Pending, plan: StepPlan, result: StepResult
    ) -> tuple[StepPlan, list[Found]] | None:
        """What follows once the draft has come so far, None if that is not to be waited for."""
        leave, cache, stopping = self._leave, self._cache, self._runtime.stopping
        end = time.monotonic_ns() + PATIENCE_NS
        while leave is not None and cache is not None and time.monotonic_ns() < end:
            # A draft that does not run ahead need not begin a pass that nobody wants.
            cache.reader_waits = pending.last
            while pending.lasts(cache):
                if self._plans.waiting() or stopping.is_set() or time.monotonic_ns() >= end:
                    break
            self._hear()
            leave = self._leave
            if self._next is not None or leave is None or stopping.is_set():
                return None
            found = follow_on(leave, plan, result.outcomes, cache)
            if not isinstance(found, Pending):
                return found
            pending = found
        return None

    def _planned(self, result: StepResult) -> tuple[StepPlan | None, StepResult]:
        """The next step is the scheduler's, a plan that has come or is to come; one that takes its
        tokens from the present one is void."""
        following, self._next, self._begun = self._next, None, False
        return following, result

    def _tell(self) -> None:
        for plan, result in self._untold:
            ranks = {}
            if self._runtime.config.target.tp > 1:  # tells whether all ranks got the same tokens
                fed = [(row.slot, row.start, row.tokens) for row in plan.rows]
                ranks["fed"] = zlib.crc32(repr(fed).encode())
            self._runtime.log.info(
                "verify",
                step=plan.step,
                start=result.started_ns,
                forward=result.forward_ns,
                end=result.finished_ns,
                rows=len(plan.rows),
                tokens=sum(len(row.tokens) for row in plan.rows),
                **ranks,
            )
        self._untold.clear()
