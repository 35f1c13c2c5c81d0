from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.channel import Transport, TypedReceiver, TypedSender
from ipc.messages.draft import DepthReady, DraftNotice
from ipc.messages.target import RowOutcome, StepPlan, StepResult, StepRow
from ipc.rundir import RunDir
from ipc.shm_channel import ShmChannel
from ipc.zmq_channel import ZmqChannel
from procs.liveness import StopFlag
from ssd_pipe.errors import PeerLost, ResourceError

NOTICE = DepthReady(round=1, depth=2)


class Owner:
    """A process of a run, without its hub."""

    def __init__(self, rundir: RunDir, transport: Transport) -> None:
        self.rundir = rundir
        self.transport = transport
        self.stopping = StopFlag()


@pytest.fixture(params=["shm", "zmq"])
def owner(shm_dir: Path, request: pytest.FixtureRequest) -> Iterator[Owner]:
    with RunDir.create(shm_dir, "r") as run:
        yield Owner(run, request.param)


def test_messages_arrive_whole_and_in_order(owner: Owner) -> None:
    receiver = TypedReceiver.open(owner, "a", StepPlan)
    sender = TypedSender.open(owner, "a", StepPlan)
    row = StepRow(slot=1, start=2, tokens=[3, 4], chain=1, sample=True, blocks=[7])
    plans = [StepPlan(step=n, rows=[row] * n) for n in range(50)]
    for plan in plans:
        sender.send(plan)
    assert [receiver.recv(5) for _ in plans] == plans
    assert receiver.recv(0) is None
    sender.close()
    receiver.close()


def test_sender_may_come_first(owner: Owner) -> None:
    sender = TypedSender.open(owner, "a", DraftNotice)
    sender.send(NOTICE)
    receiver = TypedReceiver.open(owner, "a", DraftNotice)
    assert receiver.recv(5) == NOTICE


def test_recv_ends_at_its_deadline_and_at_the_stop_flag(owner: Owner) -> None:
    receiver = TypedReceiver.open(owner, "a", DraftNotice)
    start = time.monotonic()
    assert receiver.recv(0.05) is None
    assert time.monotonic() - start >= 0.045
    owner.stopping.set("test")
    start = time.monotonic()
    assert receiver.recv(30) is None
    assert time.monotonic() - start < 5
    sender = TypedSender.open(owner, "a", DraftNotice)
    sender.send(NOTICE)
    assert wait_for(receiver) == NOTICE  # what was sent can still be taken


def test_waiting_takes_nothing(owner: Owner) -> None:
    receiver = TypedReceiver.open(owner, "a", DraftNotice)
    assert not receiver.waiting()
    sender = TypedSender.open(owner, "a", DraftNotice)
    sender.send(NOTICE)
    deadline = time.monotonic() + 5
    while not receiver.waiting() and time.monotonic() < deadline:
        pass
    assert receiver.waiting()
    assert receiver.recv(0) == NOTICE
    assert not receiver.waiting()


def test_another_descriptor_ends_the_wait(owner: Owner) -> None:
    receiver = TypedReceiver.open(owner, "a", DraftNotice)
    other = os.eventfd(1)
    receiver.also_watch(other)
    start = time.monotonic()
    assert receiver.recv(30) is None
    assert time.monotonic() - start < 5
    sender = TypedSender.open(owner, "a", DraftNotice)
    sender.send(NOTICE)
    assert wait_for(receiver) == NOTICE
    os.close(other)


def wait_for(receiver: TypedReceiver[DraftNotice]) -> DraftNotice | None:
    deadline = time.monotonic() + 5
    while (message := receiver.recv(0)) is None and time.monotonic() < deadline:
        pass
    return message


def test_descriptor_works_with_a_poller(owner: Owner) -> None:
    receiver = TypedReceiver.open(owner, "a", DraftNotice)
    sender = TypedSender.open(owner, "a", DraftNotice)
    poll = select.poll()
    poll.register(receiver.fileno(), select.POLLIN)
    for burst in (1, 3, 2):
        for _ in range(burst):
            sender.send(NOTICE)
        taken = 0
        while taken < burst:
            assert poll.poll(5000)
            while receiver.recv(0) is not None:
                taken += 1
    while receiver.recv(0) is not None:
        pass
    if owner.transport == "shm":  # ZeroMQ's descriptor may be readable without a message
        assert poll.poll(0) == []


def test_an_unreadable_message_is_the_peers_fault(owner: Owner) -> None:
    receiver = TypedReceiver.open(owner, "a", StepPlan)
    sender = TypedSender.open(owner, "a", StepResult)
    sender.send(StepResult(1, [RowOutcome(0, 1)], 1, 2, 3))
    with pytest.raises(PeerLost, match="unreadable"):
        receiver.recv(5)


def test_full_channels_raise(shm_dir: Path) -> None:
    with RunDir.create(shm_dir, "r") as run:
        ring = ShmChannel.open(run, "a", capacity=64)
        with pytest.raises(ResourceError, match="does not fit"):
            ring.send(b"x" * 100)
        ring.send(b"x" * 40)
        with pytest.raises(PeerLost, match="full"):
            ring.send(b"x" * 40, timeout=0.02)
        queue = ZmqChannel.sender(run.endpoint("nobody"))
        with pytest.raises(PeerLost, match="queue full"):
            send_many(queue, 100_000)


def send_many(channel: ZmqChannel, count: int) -> None:
    for _ in range(count):
        channel.send(b"x", timeout=0.02)


def test_receivers_of_one_name_exclude_each_other(shm_dir: Path) -> None:
    with RunDir.create(shm_dir, "r") as run:
        first = ZmqChannel.receiver(run.endpoint("a"))
        with pytest.raises(ResourceError, match="in use"):
            ZmqChannel.receiver(run.endpoint("a"))
        first.close()
        assert oct(os.stat(run.path).st_mode)[-3:] == "700"


def test_zmq_over_tcp() -> None:
    receiver = ZmqChannel.receiver("tcp://127.0.0.1:0")
    sender = ZmqChannel.sender(receiver.endpoint)
    sender.send(b"over tcp")
    assert receiver.recv(5) == b"over tcp"


def test_who_spins_waits_no_longer_than_asked(shm_dir: Path) -> None:
    with RunDir.create(shm_dir, "r") as run:
        channel = ShmChannel.open(run, "a", spin_us=60_000_000)
        begun = time.monotonic()
        assert channel.recv(0.01) is None
        assert 0.01 <= time.monotonic() - begun < 30
        channel.close()
