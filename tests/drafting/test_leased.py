"""Plans made from records are those the scheduler would have sent."""

from __future__ import annotations

import numpy as np
import pytest

from ipc import round_records as rr
from ipc.messages.draft import DraftLease, DraftPlan, DraftRow
from ipc.round_records import RoundRecords
from ssd_pipe.config import SpeculationSection
from ssd_pipe.drafting.leased import RecordPlans
from ssd_pipe.engine.hashing import extend_all

K, SLOTS = 3, 4
HASH = 77


class Lease:
    """Two rows in slots 3 and 1, followed from round 5 on."""

    def __init__(self, backup: int = K, rounds: int = 4, always: bool = False) -> None:
        memory = np.zeros(RoundRecords.size_bytes(SLOTS, K), np.uint8)
        self.records = RoundRecords(memory, SLOTS, K)
        self.tokens = {3: [1, 2, 3, 4, 5], 1: [1, 2, 9, 1, 2]}
        self.plans = RecordPlans(self.records, SpeculationSection(k=K), self.tokens.__getitem__)
        rows = [
            DraftRow(3, 4, [5], [6], True, HASH),
            DraftRow(1, 5, [], [], True, HASH + 1),
        ]
        lease = DraftLease(5, rounds, backup, always)
        self.plans.begin(DraftPlan(round=20, rows=rows, lease=lease, number=5))

    def write(
        self,
        number: int,
        row: int,
        accepted: int = 0,
        token: int = 0,
        chain: list[int] | None = None,
        following: list[int] | None = None,
        room: int = K,
        flags: int = 0,
    ) -> None:
        if following is None:
            following = []
        if chain is None:
            chain = []
        line = self.records.records[number % rr.ROUNDS, row]
        head = rr.RECORD_HEAD
        line[rr.ACCEPTED], line[rr.TOKEN], line[rr.ROOM] = accepted, token, room
        line[rr.CHAIN], line[rr.READY], line[rr.FLAGS] = len(chain), len(following), flags
        line[rr.ENTRY] = 2 if following else -1
        line[head : head + len(chain)] = chain
        line[head + K : head + K + len(following)] = following
        line[rr.NUMBER] = number

    def answer(self, slot: int) -> tuple[int, list[int]]:
        mail = self.records.mail[slot].tolist()
        return mail[rr.ANSWER], mail[rr.MAIL_HEAD : rr.MAIL_HEAD + mail[rr.LENGTH]]


def test_hits_and_misses() -> None:
    lease = Lease()
    assert lease.plans.take() is None
    lease.write(5, 0, accepted=1, token=8, chain=[6], following=[10, 11], room=1)
    assert lease.plans.take() is None
    lease.write(5, 1, token=7)
    plan = lease.plans.take()
    assert plan == DraftPlan(
        round=21,
        number=6,
        rows=[
            DraftRow(3, 5, [6, 8], [10], True, extend_all(HASH, [6, 8]), entry=2),
            DraftRow(1, 5, [7], [], True, extend_all(HASH + 1, [7]), after_miss=True, place=1),
        ],
    )
    # Another row hit, so the one that missed is not drafted for; its text holds no such n-gram.
    assert lease.answer(1) == (5, [])
    assert lease.records.progress(rr.DRAFTED) == 5
    lease.write(6, 0, accepted=1, token=4, chain=[10])
    lease.write(6, 1, token=9, room=2)
    plan = lease.plans.take()
    assert plan is not None
    assert [row.backup for row in plan.rows] == [K, 2]
    assert [row.length for row in plan.rows] == [7, 6]
    assert lease.answer(3) == (0, [])


def test_n_grams() -> None:
    lease = Lease(backup=0)
    lease.write(5, 0, flags=rr.FINISHED)
    lease.write(5, 1, token=9, room=2)
    plan = lease.plans.take()
    assert plan is not None
    assert [(row.slot, row.chain, row.backup) for row in plan.rows] == [(1, [1, 2], 0)]
    assert lease.answer(1) == (5, [1, 2])


@pytest.mark.parametrize(("backup", "always", "expected"), [(-1, False, 0), (2, True, 2)])
def test_other_backups(backup: int, always: bool, expected: int) -> None:
    lease = Lease(backup, always=always)
    lease.write(5, 0, token=1, following=[3])
    lease.write(5, 1, token=9)
    plan = lease.plans.take()
    assert plan is not None
    assert (plan.rows[1].backup, plan.rows[1].chain) == (expected, [])
    assert lease.answer(1) == ((5, []) if backup < 0 else (0, []))


def test_the_last_round_is_only_taken_in() -> None:
    lease = Lease(rounds=1)
    lease.write(5, 0, token=1, following=[3])
    lease.write(5, 1, token=9)
    plan = lease.plans.take()
    assert plan is not None
    assert lease.plans.over
    assert [(row.fork, row.backup, row.tokens) for row in plan.rows] == [
        (False, 0, [1]),
        (False, 0, [9]),
    ]
    assert lease.answer(1) == (0, [])
    assert lease.plans.take() is None


def test_rows_that_end_and_leases_that_end_early() -> None:
    lease = Lease()
    lease.write(5, 0, token=1, flags=rr.FINISHED)
    lease.write(5, 1, token=9, following=[2])
    plan = lease.plans.take()
    assert plan is not None
    assert [row.slot for row in plan.rows] == [1]
    lease.write(6, 0, flags=rr.IDLE)
    lease.write(6, 1, token=3, flags=rr.FINISHED)
    plan = lease.plans.take()
    assert plan is not None
    assert not plan.rows
    assert lease.plans.over
    other = Lease()
    other.plans.end()
    other.write(5, 0)
    other.write(5, 1)
    assert other.plans.over
    assert other.plans.take() is None
    with pytest.raises(ValueError, match="without a lease"):
        other.plans.begin(DraftPlan(1, []))
