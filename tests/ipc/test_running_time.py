"""A pause of the whole machine is nobody's delay: whoever waits goes on waiting after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ipc.doorbell import Doorbell
from ipc.handover import Handover
from ipc.lockstep import Lockstep
from ipc.ring import Ring
from ipc.rundir import RunDir
from ipc.running_time import RunningTime
from ipc.shm_channel import ShmChannel

HOUR = 3600.0
StandStill = Callable[[float], None]


def in_turn(*steps: Callable[[], None]) -> Callable[[], None]:
    """Does the next one each time it is called, and nothing after the last."""
    left = list(steps)
    return lambda: left.pop(0)() if left else None


def test_a_pause_counts_as_two_turns(stand_still: StandStill) -> None:
    clock = RunningTime(0.5)
    stand_still(0.25)
    assert 0.25 <= clock.read() < 0.3
    stand_still(HOUR)
    assert 1.25 <= clock.read() < 1.3
    assert clock.now < 1.3


def test_a_full_ring_waits_for_its_reader(
    shm_dir: Path, stand_still: StandStill, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = (Ring.create_or_open(shm_dir / "r", 64) for _ in range(2))
    writer.send(b"x" * 50)
    turn = in_turn(lambda: stand_still(HOUR), lambda: assert_got(reader, b"x" * 50))
    monkeypatch.setattr(time, "sleep", lambda seconds: turn())
    writer.send(b"y" * 50, timeout=5.0)
    assert_got(reader, b"y" * 50)


def assert_got(ring: Ring, record: bytes) -> None:
    assert ring.recv() == record


def test_two_in_step_wait_for_each_other(shm_dir: Path, stand_still: StandStill) -> None:
    with RunDir.create(shm_dir, "r") as run:
        out, back = ShmChannel.open(run, "there"), ShmChannel.open(run, "back")
        answer = msgspec.msgpack.encode(("", b"two"))
        turn = in_turn(lambda: stand_still(HOUR), lambda: back.send(answer))
        assert Lockstep(out, back, True, turn).together(timeout=5.0) == b"two"


def test_the_target_waits_for_rows(tmp_path: Path, stand_still: StandStill) -> None:
    class Bell(Doorbell):
        def wait(self, timeout: float) -> bool:
            turn()
            return super().wait(timeout)

    draft = Handover.create(tmp_path / "rows", Doorbell(tmp_path / "bell"), 1, 2, 8)
    target = Handover.open(tmp_path / "rows", Bell(tmp_path / "bell"), 1, 2, 8)
    rows = np.ones((2, 8), np.float32)
    turn = in_turn(lambda: stand_still(HOUR), lambda: None, lambda: draft.put(0, 1, rows))
    taken = target.take(0, 1, 2, timeout=5.0)
    assert taken is not None
    assert (taken == rows).all()
