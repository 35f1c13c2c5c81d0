"""Shares of several draft workers: each branch has one owner, and the load is even."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.messages.draft import DraftPlan, DraftRow
from ssd_pipe.engine.partition import (
    Share,
    maker,
    numbered,
    owner,
    part_entries,
    with_backups,
)

workers_of = st.integers(1, 4)
slots = st.integers(0, 40)
totals = st.integers(0, 60)


@given(workers=workers_of, slot=slots, total=totals)
def test_every_branch_has_one_owner_who_knows_it(workers: int, slot: int, total: int) -> None:
    shares = [Share(worker, workers) for worker in range(workers)]
    taken = [list(share.of(slot, range(total))) for share in shares]
    assert sorted(entry for mine in taken for entry in mine) == list(range(total))
    for share, mine in zip(shares, taken, strict=True):
        assert len(mine) <= part_entries(total, workers)
        assert [share.entry(slot, place) for place in range(len(mine))] == mine
        assert [share.place(entry) for entry in mine] == list(range(len(mine)))
        assert all(owner(slot, entry, workers) == share.worker for entry in mine)


@given(workers=workers_of, slot=slots, leading=totals)
def test_the_likeliest_branches_are_spread(workers: int, slot: int, leading: int) -> None:
    counts = [Share(worker, workers).count(slot, leading) for worker in range(workers)]
    assert sum(counts) == leading
    assert max(counts) - min(counts) <= 1


@given(workers=workers_of, total=totals)
def test_what_does_not_divide_falls_on_another_worker_in_every_slot(
    workers: int, total: int
) -> None:
    rows = range(workers * 3)
    loads = [
        sum(Share(worker, workers).count(slot, total) for slot in rows) for worker in range(workers)
    ]
    assert loads == [3 * total] * workers


@given(count=st.integers(1, 10**9), workers=workers_of, data=st.data())
def test_a_hand_over_number_tells_who_makes_it(
    count: int, workers: int, data: st.DataObject
) -> None:
    worker = data.draw(st.integers(0, workers - 1))
    number = numbered(count, worker, workers)
    assert number > 0
    assert maker(number, workers) == worker
    assert [Share(w, workers).makes(number) for w in range(workers)].count(True) == 1
    assert Share(worker, workers).makes(number)
    assert numbered(count + 1, worker, workers) - number == workers


@pytest.mark.parametrize(("entries", "workers", "most"), [(1, 4, 1), (12, 4, 3), (13, 4, 4)])
def test_parts_are_as_small_as_can_be(entries: int, workers: int, most: int) -> None:
    assert part_entries(entries, workers) == most


def test_a_plan_with_its_backups_filled_in_asks_nobody_else_for_them() -> None:
    missed = DraftRow(slot=3, length=9, tokens=[4], chain=[], fork=True, prefix_hash=1, backup=2)
    missed = msgspec.structs.replace(missed, handover=7, after_miss=True)
    hit = DraftRow(slot=1, length=5, tokens=[6, 7], chain=[8], fork=True, prefix_hash=2, entry=4)
    plan = DraftPlan(round=12, rows=[missed, hit], drop=[0])
    filled = with_backups(plan, {3: [10, 11], 1: [8]})
    wanted = msgspec.structs.replace(missed, chain=[10, 11], backup=0)
    assert filled == DraftPlan(round=12, rows=[wanted, hit], drop=[0])
