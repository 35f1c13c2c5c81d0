"""The channels between the scheduler and the draft's workers: plans out, notices back.

The draft is one worker or several, which share the branches of a round. All of them get every plan.
One with backups goes to the first worker, which makes them, and to the others once those chains are
known: till then they have nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ipc.channel import TypedReceiver, TypedSender
from ipc.doorbell import default_spin_us
from ipc.messages.draft import DraftNotice, DraftPlan, DraftTimes
from procs import channels
from procs.runtime import Runtime
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.engine.partition import with_backups
from ssd_pipe.engine.request import Request
from ssd_pipe.errors import PeerLost
from ssd_pipe.members import process_names


class DraftWorkers:
    """Opens the channels; the workers may come later.

    Attributes:
        names: process names, by worker.
        free: each worker's KV blocks for trunks that are free, as far as it has told.
        asked: number of the fresh plan that is to be answered, 0 if none is.
    """

    def __init__(self, runtime: Runtime, sizes: Dimensions, patience: float) -> None:
        """``patience``: seconds a worker may leave no room for a plan."""
        self.names = process_names(runtime.config, "draft")
        self.free = [0] * len(self.names)
        self.asked = 0
        self._patience = patience
        self._unasked: set[int] = set()  # workers that have not been sent the question
        self._unanswered: set[int] = set()  # workers that have not answered it
        self._held: DraftPlan | None = None  # what workers but the first are still to get
        self._plans: list[TypedSender[DraftPlan]] = [
            TypedSender.open(
                runtime, channels.draft_plans(worker), DraftPlan, capacity=sizes.plan_bytes
            )
            for worker in range(len(self.names))
        ]
        self._notices: list[TypedReceiver[DraftNotice]] = [
            TypedReceiver.open(
                runtime, channels.draft_notices(worker), DraftNotice, spin_us=default_spin_us()
            )
            for worker in range(len(self.names))
        ]

    def __len__(self) -> int:
        return len(self.names)

    # ------------------------------------------------------------ plans

    def send(self, plan: DraftPlan) -> None:
        """Give every worker a plan, or the first one if it has backups to make. Raises PeerLost."""
        if len(self) > 1 and any(row.backup for row in plan.rows):
            self._held = plan
            self._send(plan, range(1))
        else:
            self._send(plan, range(len(self)))

    def send_rest(self, waiting: Mapping[int, Request]) -> None:
        """Give the other workers the plan whose backups have come, to ``waiting`` requests by slot,
        if there is one. Raises PeerLost."""
        held, self._held = self._held, None
        if held is not None:
            chains = {slot: request.chain for slot, request in waiting.items()}
            self._send(with_backups(held, chains), range(1, len(self)))

    def drop_rest(self) -> None:
        """The others do not get it any more."""
        self._held = None

    def _send(self, plan: DraftPlan, workers: Iterable[int]) -> None:
        for worker in workers:
            try:
                self._plans[worker].send(plan, self._patience)
            except PeerLost:
                name = self.names[worker]
                raise PeerLost(f"{name}: takes no plans", name) from None

    # ------------------------------------------------------------ notices

    def notice(self, worker: int, wait: float) -> DraftNotice | None:
        """What a worker has to say, None if nothing comes within ``wait`` seconds."""
        return self._notices[worker].recv(wait)

    # ------------------------------------------------------------ a question

    def ask(self, number: int) -> None:
        """Begin to ask all workers for a sign of life, by a fresh plan of this number: none comes
        before what is older has been done or skipped."""
        self.asked = number
        self._unasked = set(range(len(self)))
        self._unanswered = set(self._unasked)

    def cease(self) -> None:
        """Whoever comes next is asked anew."""
        self.asked = 0

    def answered(self, wait: float) -> bool:
        """Whether all have answered; ``wait``: seconds an answer may take that is due."""
        for worker in sorted(self._unasked):
            try:
                self._plans[worker].send(DraftPlan(round=self.asked, rows=[], fresh=True), 0)
            except PeerLost:
                return False  # no room beside what it has not read yet
            self._unasked.discard(worker)
        for worker in sorted(self._unanswered):
            while (notice := self.notice(worker, wait)) is not None:
                if isinstance(notice, DraftTimes) and notice.round == self.asked:
                    self._unanswered.discard(worker)
                    self.free[worker] = notice.free_blocks
                    break
        return not self._unanswered

    @property
    def silent(self) -> int:
        """The first worker that has not answered, 0 if all have."""
        return min(self._unanswered, default=0)
