"""Draft distributions in shared memory: each number's own rows or none, whoever comes and goes."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from ipc.doorbell import Doorbell
from ipc.handover import Handover

SLOTS, K, VOCAB = 3, 4, 50
WAIT = 10.0


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Handover, Handover]:
    return pair(tmp_path)


def pair(folder: Path) -> tuple[Handover, Handover]:
    """The draft's side and the target's."""
    shape = (Doorbell(folder / "bell"), SLOTS, K, VOCAB)
    return Handover.create(folder / "rows", *shape), Handover.open(folder / "rows", *shape)


def rows_of(number: int, length: int = K, width: int = VOCAB) -> np.ndarray:
    return np.full((length, width), number, np.float32)


def test_every_step_takes_the_rows_of_its_own_number(sides: tuple[Handover, Handover]) -> None:
    """The draft writes for a step when the step before has been judged, as plans go out."""
    draft, target = sides
    judged = threading.Semaphore(1)

    def write() -> None:
        for number in range(1, 200):
            assert judged.acquire(timeout=WAIT)
            draft.put(number % SLOTS, number, rows_of(number))

    writer = threading.Thread(target=write)
    writer.start()
    for number in range(1, 200):
        found = target.take(number % SLOTS, number, K, WAIT)
        assert found is not None
        assert (found == number).all()
        judged.release()
    writer.join(WAIT)


def test_a_late_draft_is_taken_for_none_and_its_rows_for_nobody_elses(
    sides: tuple[Handover, Handover],
) -> None:
    draft, target = sides
    assert target.take(1, 7, K, 0.0) is None
    assert not target.arrived(1, 7)
    draft.put(1, 7, rows_of(7))
    assert target.take(1, 8, K, 0.0) is None
    draft.put(1, 8, rows_of(8, 2, VOCAB - 10))
    found = target.take(1, 8, 2, 0.0)
    assert found is not None
    assert (found[:, :-10] == 8).all()
    assert not found[:, -10:].any()
    assert target.take(1, 8, 3, 0.0) is None  # fewer rows than the chain has tokens


def test_lost_rows_are_told_at_once(sides: tuple[Handover, Handover]) -> None:
    draft, target = sides
    draft.put(0, 3, None)
    assert target.take(0, 3, K, WAIT) is None
    assert target.arrived(0, 3)


def test_another_draft_takes_over(tmp_path: Path) -> None:
    first, target = pair(tmp_path)
    first.put(2, 5, rows_of(5))
    second, _ = pair(tmp_path)
    second.put(2, 6, rows_of(6))
    found = target.take(2, 6, K, WAIT)
    assert found is not None
    assert (found == 6).all()


def test_a_slot_has_one_set_of_rows() -> None:
    assert Handover.size_bytes(SLOTS, K, VOCAB) == SLOTS * (4 * K * VOCAB + 16)
