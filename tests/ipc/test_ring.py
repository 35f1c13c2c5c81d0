from __future__ import annotations

import os
import tempfile
import zlib
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.ring import Ring
from ssd_pipe.errors import PeerLost, ResourceError
from tests.ipc.child import records
from tests.ipc.conftest import Start
from tests.waiting import wait_for

operations = st.lists(st.one_of(st.none(), st.integers(0, 200)), max_size=60)


def footprint(size: int) -> int:
    return 8 + (size + 7) // 8 * 8


@settings(max_examples=150, deadline=None)
@given(operations, st.integers(1, 300))
def test_behaves_like_a_bounded_queue(script: list[int | None], capacity: int) -> None:
    """None takes a record, a number sends one of that size."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        producer = Ring.create(Path(folder) / "r", capacity)
        consumer = Ring.open(Path(folder) / "r")
        model: deque[bytes] = deque()
        used = 0
        for number, size in enumerate(script):
            if size is None:
                expected = model.popleft() if model else None
                used -= footprint(len(expected)) if expected is not None else 0
                assert consumer.recv() == expected
                assert producer.empty() == (not model)
                continue
            record = bytes((number + i) % 256 for i in range(size))
            if footprint(size) > producer.capacity:
                with pytest.raises(ResourceError, match="does not fit"):
                    producer.send(record)
            elif used + footprint(size) > producer.capacity:
                with pytest.raises(PeerLost, match="full"):
                    producer.send(record, timeout=0)
            else:
                producer.send(record)
                model.append(record)
                used += footprint(size)
        producer.close()
        consumer.close()


def test_stress_between_two_processes(shm_dir: Path, start: Start) -> None:
    path = shm_dir / "ring"
    ring = Ring.create(path, 2000)
    start("produce", path, 11, 6_000, 900)
    for expected in records(11, 6_000, 900):
        got: list[bytes] = []

        def arrived(got: list[bytes] = got) -> bool:
            record = ring.recv()
            if record is not None:
                got.append(record)
            return bool(got)

        wait_for(arrived, 20)
        assert got[0] == expected
    assert ring.recv() is None


def test_killed_producer_leaves_whole_records_only(shm_dir: Path, start: Start) -> None:
    path = shm_dir / "ring"
    ring = Ring.create(path, 1 << 16)
    child = start("produce_forever", path)
    assert child.stdout is not None
    assert child.stdout.readline() == "going\n"
    expected = 0
    while expected < 2000:  # somewhere in the middle, the ring partly full
        record = ring.recv()
        if record is not None:
            check(record, expected)
            expected += 1
    child.kill()
    child.wait()
    while (record := ring.recv()) is not None:
        check(record, expected)
        expected += 1
    assert ring.empty()


def check(record: bytes, number: int) -> None:
    assert zlib.crc32(record[4:]) == int.from_bytes(record[:4], "little")
    assert int.from_bytes(record[4:12], "little") == number


def test_killed_consumer_is_noticed(shm_dir: Path) -> None:
    ring = Ring.create(shm_dir / "r", 64)
    ring.send(b"x" * 50)
    with pytest.raises(PeerLost, match=r"ring full for 0\.05 s"):
        ring.send(b"y" * 20, timeout=0.05)


def test_either_side_may_open_first(shm_dir: Path) -> None:
    a = Ring.create_or_open(shm_dir / "r", 100)
    a.send(b"one")
    b = Ring.create_or_open(shm_dir / "r", 100)
    assert b.recv() == b"one"
    with pytest.raises(ResourceError, match="expected"):
        Ring.create_or_open(shm_dir / "r", 200)
    assert os.listdir(shm_dir) == ["r"]


def test_what_is_no_ring_is_refused(shm_dir: Path) -> None:
    with pytest.raises(ResourceError, match="No such file"):
        Ring.open(shm_dir / "r")
    (shm_dir / "r").write_bytes(bytes(4096))
    with pytest.raises(ResourceError, match="not a ring"):
        Ring.open(shm_dir / "r")
    with pytest.raises(ResourceError, match="exists"):
        Ring.create(shm_dir / "r", 100)


def test_damage_is_an_error_not_a_crash(shm_dir: Path) -> None:
    ring = Ring.create(shm_dir / "r", 64)
    ring.send(b"abc")
    ring._words[24] = 1 << 62  # the record's length
    with pytest.raises(PeerLost, match="damaged"):
        ring.recv()


def test_not_enough_memory_is_an_error_at_start(shm_dir: Path) -> None:
    with pytest.raises(ResourceError, match="not enough shared memory"):
        Ring.create(shm_dir / "r", 1 << 50)
    assert os.listdir(shm_dir) == []
