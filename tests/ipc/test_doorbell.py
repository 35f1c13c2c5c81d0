from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path

import pytest
import zmq

from ipc.doorbell import Doorbell
from ipc.rundir import RunDir
from ipc.shm_channel import ShmChannel
from ssd_pipe.errors import ResourceError
from tests.ipc.conftest import Start


def test_rings_coalesce_and_are_taken(shm_dir: Path) -> None:
    bell, listener = Doorbell(shm_dir / "b"), Doorbell(shm_dir / "b")
    assert not listener.wait(0)
    bell.ring()
    bell.ring()
    assert listener.wait(0)
    assert not listener.wait(0)
    assert not listener.drain()


def test_ringing_never_blocks(shm_dir: Path) -> None:
    bell = Doorbell(shm_dir / "b")
    for _ in range(70_000):  # more than a pipe holds
        bell.ring()
    assert bell.wait(0)
    assert not bell.wait(0)


def test_wait_ends_at_its_deadline(shm_dir: Path) -> None:
    bell = Doorbell(shm_dir / "b")
    start = time.monotonic()
    assert not bell.wait(0.05)
    assert 0.045 <= time.monotonic() - start < 2


def test_a_closed_ringer_does_not_ring(shm_dir: Path) -> None:
    listener = Doorbell(shm_dir / "b")
    Doorbell(shm_dir / "b").close()
    assert not listener.wait(0.01)


def test_a_stop_flag_ends_the_wait(shm_dir: Path) -> None:
    bell = Doorbell(shm_dir / "b")
    stop = os.eventfd(1)
    bell.also_watch(stop)
    start = time.monotonic()
    assert not bell.wait(30)
    assert time.monotonic() - start < 5
    os.close(stop)


def test_fits_a_zmq_poller(shm_dir: Path) -> None:
    bell = Doorbell(shm_dir / "b")
    poller = zmq.Poller()
    poller.register(bell, zmq.POLLIN)
    assert poller.poll(0) == []
    bell.ring()
    assert [fd for fd, _ in poller.poll(1000)] == [bell.fileno()]


async def test_fits_asyncio(shm_dir: Path) -> None:
    bell = Doorbell(shm_dir / "b")
    rung = asyncio.Event()
    asyncio.get_running_loop().add_reader(bell, rung.set)
    bell.ring()
    await asyncio.wait_for(rung.wait(), 5)
    asyncio.get_running_loop().remove_reader(bell)


def test_something_else_in_its_place_is_refused(shm_dir: Path) -> None:
    (shm_dir / "b").touch()
    with pytest.raises(ResourceError, match="not a doorbell"):
        Doorbell(shm_dir / "b")
    with pytest.raises(ResourceError, match="No such file"):
        Doorbell(shm_dir / "nowhere" / "b")


@pytest.mark.parametrize("spin_us", [0, 50])
def test_round_trip_between_processes(shm_dir: Path, start: Start, spin_us: int) -> None:
    with RunDir.create(shm_dir, "r") as run:
        there, back = ShmChannel.open(run, "there"), ShmChannel.open(run, "back", spin_us=spin_us)
        child = start("echo", shm_dir, "r", spin_us)
        assert child.stdout is not None
        child.stdout.readline()
        times = []
        for number in range(300):
            before = time.perf_counter()
            there.send(number.to_bytes(4, "little"))
            assert back.recv(10) == number.to_bytes(4, "little")
            times.append(time.perf_counter() - before)
        there.send(b"")
        assert child.wait(10) == 0
        # Wake-ups are tens of microseconds; a lost one would cost the whole timeout.
        assert statistics.median(times) < 5e-3
        assert max(times) < 5
