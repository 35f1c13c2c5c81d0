"""The scheduler's side of the draft: its part of each step, the waits for it, life without it.

The draft is one worker or several (``draft_workers``). The loss of one is the loss of the draft.

A draft that dies, or that keeps the target waiting too long, is in *trouble* and left out: the
target decodes alone. It is used again once it has answered a fresh plan, which makes it forget
every sequence. Whether the same process has woken up or another one has come in its place makes no
difference; what was sent before the fresh plan is done or skipped, and no record of it counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from ipc.messages.draft import DepthReady, DraftPlan, DraftTimes
from procs.cache_map import map_cache
from procs.draft_workers import DraftWorkers
from procs.runtime import Runtime
from procs.waiting import PEER_POLL, STUCK, Waiter
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.engine.leases import Leased
from ssd_pipe.engine.partition import owner
from ssd_pipe.engine.partitioned_cache import PartitionedCache
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.round_times import RoundTimes
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.errors import PeerLost

DRAFT = "draft"
DEPTH_POLL = 0.005  # seconds; bounds the loss where the draft misses that someone waits
PATIENCE = 3.0  # most seconds the target is kept waiting for the draft
GREETING = 10.0  # most seconds a new group waits for the draft's first answer


class DraftPort:
    """Opens the channels; the workers may come later.

    Attributes:
        trouble: why the draft is not used, one line; empty while it is.
        losses: how often it has been given up.
        read: the last leased round that the scheduler has followed.
        total_blocks, free_blocks: its KV blocks for trunks, as far as it has told.
    """

    def __init__(
        self, runtime: Runtime, sizes: Dimensions, waiter: Waiter, times: RoundTimes
    ) -> None:
        run = runtime.config.run
        self.trouble = f"{DRAFT}: starting"
        self.losses = 0
        self._needed = run.on_draft_failure == "fail"
        self._patience = STUCK if self._needed else min(PATIENCE, run.beat_timeout / 2)
        self._runtime = runtime
        self._sizes = sizes
        self._waiter = waiter
        self._times = times
        self._workers = DraftWorkers(runtime, sizes, min(self._patience, PATIENCE))
        self.read = 0
        self.total_blocks = 0

    def begin(self, total_blocks: int) -> None:
        """The draft is ready; each worker has at least so many KV blocks for trunks."""
        self.total_blocks = total_blocks
        self._workers.free = [total_blocks] * len(self._workers)

    @property
    def free_blocks(self) -> int:
        """Of the worker that has the fewest left."""
        return min(self._workers.free)

    @property
    def usable(self) -> bool:
        """Whether it is used and every worker is there."""
        return not self.trouble and not self._absence()

    def map_cache(self) -> PartitionedCache:
        """The speculation cache, once every worker is ready and has made its part."""
        return map_cache(self._runtime, self._sizes)

    def send(self, plan: DraftPlan, leased: Leased | None = None) -> None:
        """Give the draft its part of a step, if it has one, or of a lease's first."""
        if leased is not None:
            plan = replace(plan, lease=leased.draft, number=leased.terms.first)
        if self.trouble or not (plan.rows or plan.begin or plan.drop):
            return
        if self.read:
            plan = replace(plan, read=self.read)
        try:
            self._workers.send(plan)
        except PeerLost as error:
            self._give_up(error)

    def send_rest(self, waiting: Mapping[int, Request]) -> None:
        """See DraftWorkers."""
        try:
            self._workers.send_rest(waiting)
        except PeerLost as error:
            self._give_up(error)

    # ------------------------------------------------------------ with and without it

    def look(self, planner: RoundPlanner, running: Iterable[Request], wait: float = 0.0) -> None:
        """Between steps: leave out a draft in trouble, take in one that is out of it.

        Sets ``planner.drafting``. ``wait``: seconds an answer may take that is due.
        """
        if absence := self._absence():
            self._workers.cease()
            if self.trouble:
                self.trouble = absence
            else:
                self._lose(absence)
        elif self.trouble:
            self._ask(planner, wait)
        if self.trouble:
            if planner.drafting:
                planner.suspend(running)
        elif not planner.drafting:
            planner.drafting = True  # and tells it of the requests that need it

    def greet(self, planner: RoundPlanner) -> None:
        """Begin with a draft that has just become ready."""
        planner.drafting = False
        started = self._waiter.now()
        while self.trouble and self._waiter.goes_on(started):
            self.look(planner, (), wait=PEER_POLL)
            if not self.trouble:
                return
            if absence := self._absence():
                self._lose(absence)
                return
            if self._waiter.now() - started > GREETING:
                self._give_up(self._fault("does not answer", self._workers.silent))
                return

    def _absence(self) -> str:
        """Why a worker is not there, empty while all are."""
        return next(filter(None, map(self._waiter.absence, self._workers.names)), "")

    def _ask(self, planner: RoundPlanner, wait: float) -> None:
        """Ask for a sign of life; see if it is there."""
        if not self._workers.asked:
            planner.round += 1
            self._workers.ask(planner.round)
        if self._workers.answered(wait):
            self._workers.cease()
            self.trouble = ""
            if self.losses:
                self._runtime.log.info("speculating again")

    def missed(self, what: str) -> None:
        """The GPU of the target has waited for the draft in vain. Raises PeerLost."""
        if not self.trouble:
            self._give_up(self._fault(f"{what} late"))

    def _fault(self, what: str, worker: int = 0) -> PeerLost:
        name = self._workers.names[worker]
        return PeerLost(f"{name}: {what}", name)

    def _give_up(self, fault: PeerLost) -> None:
        if self._needed:
            raise fault
        self._lose(str(fault))

    def _lose(self, reason: str) -> None:
        self.trouble = reason
        self.losses += 1
        self._workers.drop_rest()
        self._runtime.log.warning("degraded", reason=reason)

    def _check(self, started: float, what: str, worker: int = 0) -> bool:
        """Whether a wait for a worker, begun at ``started`` (of the waiter's clock), is to go on.

        Raises PeerLost.
        """
        if absence := self._absence():
            self._lose(absence)
        elif self._waiter.now() - started > self._patience:
            self._give_up(self._fault(f"no {what} within {self._patience:g} s", worker))
        return self._waiter.goes_on(started) and not self.trouble

    # ------------------------------------------------------------ waiting

    def backups(
        self,
        planner: RoundPlanner,
        waiting: Mapping[int, Request],
        backups: Mapping[int, int],
        meanwhile: Callable[[], None],
    ) -> bool:
        """Wait for the chains the current draft round makes just in time; False when stopping.

        A draft that does not bring them is in trouble.

        Args:
            waiting: requests by slot.
            backups: tokens asked for, by slot.
            meanwhile: what can be done while the draft works.
        """
        pending = set(backups)
        started = self._waiter.now()
        meanwhile()
        while pending and not self.trouble:
            notice = self._workers.notice(0, PEER_POLL)
            if isinstance(notice, DraftTimes):
                self._learn(planner, 0, notice)
            elif notice is None or isinstance(notice, DepthReady):
                pass  # nothing, or of a wait that is over
            elif notice.round == planner.round and notice.slot in pending:
                pending.discard(notice.slot)
                planner.take_backup(waiting[notice.slot], notice)
            if pending and not self._check(started, "backup chain"):
                break
        seconds = self._times.waited(self._waiter.now() - started)
        self._times.backup_wait_seconds += seconds
        # Before a request's second token, the draft may have had its prompt to read first.
        if not pending and all(
            len(waiting[slot].tokens) > waiting[slot].prompt_len + 1 for slot in backups
        ):
            planner.pace.times.observe("backup_step", seconds / max(backups.values()))
        return not self._runtime.stopping.is_set()

    def depth(self, planner: RoundPlanner, request: Request, batch: int) -> int:
        """Let a hit grow while that pays; returns when the wait was over, 0 if there was none.

        The time is CLOCK_MONOTONIC in ns.
        """
        if not planner.worth_waiting(request, batch):
            return 0
        worker = owner(request.slot, request.entry, len(self._workers))
        started = self._waiter.now()
        planner.cached.announce_wait(True)
        try:
            while planner.worth_waiting(request, batch):
                if not planner.cached.deepen(request):
                    notice = self._workers.notice(worker, DEPTH_POLL)
                    if isinstance(notice, DraftTimes):
                        self._learn(planner, worker, notice)
                        if notice.round == planner.round:
                            planner.cached.deepen(request)
                            break  # that worker has done what it will do
                if not self._check(started, "token", worker):
                    return 0
        finally:
            planner.cached.announce_wait(False)
        self._times.depth_wait_seconds += self._times.waited(self._waiter.now() - started)
        return time.monotonic_ns()

    def drain(self, planner: RoundPlanner) -> None:
        """Learn from what the draft has said meanwhile."""
        for worker in range(len(self._workers)):
            while (notice := self._workers.notice(worker, 0)) is not None:
                if isinstance(notice, DraftTimes):
                    self._learn(planner, worker, notice)

    def _learn(self, planner: RoundPlanner, worker: int, times: DraftTimes) -> None:
        self._workers.free[worker] = times.free_blocks
        busy = (times.finished_ns - times.started_ns) * 1e-9
        self._times.draft_busy_seconds += busy / len(self._workers)
        if times.steps:
            seconds = (times.tree_ns - times.glue_ns) * 1e-9 / times.steps
            planner.pace.times.observe("step", seconds)
            planner.pace.times.observe("glue", (times.glue_ns - times.backup_ns) * 1e-9)
