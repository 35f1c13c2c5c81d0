"""The draft's next plan is the right one, whoever asks for it and whatever has come meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.channel import TypedReceiver, TypedSender
from ipc.messages.draft import DraftLease, DraftPlan, DraftRow
from ipc.rundir import RunDir
from ipc.shm_channel import ShmChannel
from procs.liveness import StopFlag
from procs.plan_inbox import PlanInbox
from ssd_pipe.errors import PeerLost
from tests.drafting.test_leased import HASH, Lease

FIRST = 5  # round of ``Lease``


class Side:
    """A draft's inbox, a scheduler that sends to it, and records of a lease of misses."""

    def __init__(self, rundir: RunDir) -> None:
        self.lease = Lease()
        self.applied: list[DraftPlan] = []
        self.scheduler: TypedSender[DraftPlan] = TypedSender(ShmChannel.open(rundir, "plans"))
        receiver: TypedReceiver[DraftPlan] = TypedReceiver(
            ShmChannel.open(rundir, "plans"), DraftPlan
        )
        self.inbox = PlanInbox(receiver, StopFlag(), self.applied.append, self.lease.plans)
        self.lease.plans.end()
        self.scheduler.send(DraftPlan(round=1, rows=[], fresh=True))
        plan = self.inbox.next(1.0)
        assert plan is not None
        self.inbox.take_up(plan)

    def begin_lease(self) -> None:
        plan = DraftPlan(round=20, rows=self.rows(), lease=DraftLease(FIRST, 4, 0), number=FIRST)
        self.scheduler.send(plan)
        assert self.inbox.next(1.0) == plan
        self.inbox.take_up(plan)
        self.applied.clear()

    @staticmethod
    def rows() -> list[DraftRow]:
        return [DraftRow(3, 4, [5], [6], True, HASH), DraftRow(1, 5, [], [], True, HASH + 1)]

    def record(self, number: int) -> None:
        for row in (0, 1):
            self.lease.write(number, row, token=7)

    def end_lease(self, read: int) -> DraftPlan:
        plan = DraftPlan(round=30, rows=[], drop=[3], read=read)
        self.scheduler.send(plan)
        return plan


@pytest.fixture
def side(shm_dir: Path) -> Iterator[Side]:
    with RunDir.create(shm_dir) as rundir:
        yield Side(rundir)


def no_reader() -> bool:
    return False


@pytest.mark.parametrize("how", ["next", "last call", "interrupted"])
def test_records_that_were_seen_come_before_the_plan_that_follows_them(
    side: Side, how: str
) -> None:
    """Also where the plan is found by who only looks whether a reader still waits."""
    side.begin_lease()
    found = []
    plan = side.end_lease(read=FIRST + 1)
    for number in (FIRST, FIRST + 1):
        side.record(number)
    while not found or found[-1].round < plan.round:
        if how == "interrupted":
            assert side.inbox.interrupted()
            following = side.inbox.take_held()
        elif how == "last call":
            following = side.inbox.last_call(no_reader, 1.0)
        else:
            following = side.inbox.next(1.0)
        assert following is not None
        found.append(following)
    read = [p.number for p in [*side.applied, *found] if p.number]
    assert read == [FIRST + 1, FIRST + 2]
    assert found[-1] == plan
    assert side.lease.plans.over


def test_records_that_the_scheduler_has_seen_must_be_there(side: Side) -> None:
    side.begin_lease()
    side.record(FIRST)
    side.end_lease(read=FIRST + 1)
    assert side.inbox.last_call(no_reader, 1.0) is not None
    with pytest.raises(PeerLost, match=f"records of round {FIRST + 1} are missing"):
        side.inbox.last_call(no_reader, 1.0)


def test_what_was_kept_is_handed_out_first_and_once(side: Side) -> None:
    plans = [DraftPlan(round=number, rows=[]) for number in (2, 3)]
    for plan in plans:
        side.scheduler.send(plan)
    assert side.inbox.interrupted()
    assert side.inbox.last_call(no_reader, 1.0) == plans[0]
    assert side.inbox.take_held() is None
    assert side.inbox.next(1.0) == plans[1]
    assert side.inbox.next(0) is None


def test_a_last_call_is_over_while_somebody_waits(side: Side) -> None:
    side.scheduler.send(DraftPlan(round=2, rows=[]))
    assert side.inbox.last_call(lambda: True, 0.01) is None
    assert side.inbox.next(1.0) is not None


def test_plans_before_the_first_fresh_one_are_a_predecessors(shm_dir: Path) -> None:
    with RunDir.create(shm_dir) as rundir:
        scheduler: TypedSender[DraftPlan] = TypedSender(ShmChannel.open(rundir, "plans"))
        receiver: TypedReceiver[DraftPlan] = TypedReceiver(
            ShmChannel.open(rundir, "plans"), DraftPlan
        )
        inbox = PlanInbox(receiver, StopFlag(), lambda plan: None)
        scheduler.send(DraftPlan(round=8, rows=[]))
        assert inbox.next(0.1) is None
        scheduler.send(DraftPlan(round=0, rows=[], fresh=True))
        assert inbox.next(1.0) == DraftPlan(round=0, rows=[], fresh=True)
