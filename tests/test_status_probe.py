from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from ipc import sockets
from ipc.messages.client import Ask, Failure, StatusReply
from ssd_pipe.status_probe import LARGEST, StatusProbe

REPLY = StatusReply(
    id="", run="r", mode="ar", target="t", draft="", max_model_len=64, running=1, waiting=0
)
WITHIN = 30.0


class Frontend:
    """The public endpoint of a pipeline, by hand."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/public"
        self.socket = sockets.bind(zmq.ROUTER, self.endpoint)

    def asked(self, probe: StatusProbe) -> bytes:
        """Who asks next."""
        until = time.monotonic() + WITHIN
        while not self.socket.poll(5):
            assert probe.poll(time.monotonic()) is None
            assert time.monotonic() < until
        who, question = self.socket.recv_multipart()
        assert msgspec.msgpack.decode(question, type=Ask) == Ask("supervisor")
        return who

    def answer(self, who: bytes, *data: bytes) -> None:
        for one in data:
            self.socket.send_multipart([who, one])


@pytest.fixture
def frontend(shm_dir: Path) -> Iterator[Frontend]:
    made = Frontend(shm_dir)
    with contextlib.closing(made.socket):
        yield made


@pytest.fixture
def probe(frontend: Frontend) -> Iterator[StatusProbe]:
    with contextlib.closing(StatusProbe(frontend.endpoint, 0.02)) as made:
        yield made


def newest(probe: StatusProbe) -> StatusReply:
    until = time.monotonic() + WITHIN
    while time.monotonic() < until:
        if reply := probe.poll(time.monotonic()):
            return reply
    raise TimeoutError


def test_what_is_no_status_is_passed_over(frontend: Frontend, probe: StatusProbe) -> None:
    failure = msgspec.msgpack.encode(Failure(id="", code=500, message="no"))
    frontend.answer(frontend.asked(probe), b"\xff", failure, msgspec.msgpack.encode(REPLY))
    assert newest(probe) == REPLY
    assert probe.answered > 0


def test_a_message_too_large_cuts_the_line(frontend: Frontend, probe: StatusProbe) -> None:
    who = frontend.asked(probe)
    left = sockets.watch(frontend.socket, zmq.EVENT_DISCONNECTED)
    try:
        frontend.answer(who, bytes(LARGEST + 1))
        assert left.poll(WITHIN * 1000)
    finally:
        sockets.unwatch(frontend.socket, left)
    assert probe.answered == 0


def test_nobody_there_is_no_answer(shm_dir: Path) -> None:
    with contextlib.closing(StatusProbe(f"ipc://{shm_dir}/nobody", 0.0)) as probe:
        assert probe.poll(1.0) is None
        assert probe.answered == 0
