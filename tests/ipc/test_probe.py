from __future__ import annotations

import os
from pathlib import Path

import pytest

from ipc import probe
from ipc.channel import Channel
from ipc.probe import ProbeReport, ShmCandidate, ZmqCandidate
from ipc.rundir import RunDir
from ssd_pipe.errors import PeerLost, ResourceError
from tests.ipc.conftest import Start


class TooLargeShm(ShmCandidate):
    """Asks for more memory than the machine has."""

    def __init__(self) -> None:
        super().__init__(capacity=1 << 50)


class BadCable(ShmCandidate):
    """A transport that flips one bit of long messages on their way out."""

    def open(self, rundir: RunDir, link: str, initiator: bool) -> tuple[Channel, Channel]:
        out, back = super().open(rundir, link, initiator)
        return BitFlip(out), back


class BitFlip:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.recv, self.fileno, self.close = channel.recv, channel.fileno, channel.close

    def send(self, data: bytes | bytearray, timeout: float = 10.0) -> None:
        if len(data) > 1000:
            data = bytes([*data[:-1], data[-1] ^ 1])
        self._channel.send(data, timeout)


def test_shared_memory_is_preferred_and_leaves_nothing(shm_dir: Path) -> None:
    with RunDir.create(shm_dir) as run:
        report = probe.probe_with_child(run)
        assert report.transport == "shm"
        assert list(report.round_trips) == ["shm"]
        assert 0 < report.round_trips["shm"] < 1e6
        assert report.rejected == {}
        assert os.listdir(run.path) == [".lock"]


def test_a_forced_transport_is_used(shm_dir: Path) -> None:
    with RunDir.create(shm_dir) as run:
        assert probe.probe_with_child(run, probe.candidates("zmq")).transport == "zmq"


def initiate(
    shm_dir: Path, start: Start, mine: list[probe.Candidate], theirs: list[str]
) -> tuple[ProbeReport, str]:
    with RunDir.create(shm_dir, "r") as run:
        child = start("answer_probe", shm_dir, "r", "link", *theirs)
        report = probe.initiate(run, "link", mine)
        return report, child.communicate()[0].strip()


def test_falls_through_when_this_side_cannot(shm_dir: Path, start: Start) -> None:
    report, agreed = initiate(shm_dir, start, [TooLargeShm(), ZmqCandidate()], ["shm", "zmq"])
    assert report.transport == agreed == "zmq"
    assert "not enough shared memory" in report.rejected["shm"]


def test_falls_through_when_the_other_side_cannot(
    shm_dir: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "CANDIDATE_TIMEOUT", 0.3)
    report, agreed = initiate(shm_dir, start, [ShmCandidate(), ZmqCandidate()], ["zmq"])
    assert report.transport == agreed == "zmq"
    assert "no answer within 0.3 s" in report.rejected["shm"]


def test_falls_through_when_the_other_side_says_why(shm_dir: Path, start: Start) -> None:
    """Both sides disagree about the ring's size, so the other one cannot open it."""
    mine: list[probe.Candidate] = [ShmCandidate(capacity=1024), ZmqCandidate()]
    report, agreed = initiate(shm_dir, start, mine, ["shm", "zmq"])
    assert report.transport == agreed == "zmq"
    assert report.rejected["shm"].startswith("other side: ")


def test_falls_through_when_bytes_come_back_changed(shm_dir: Path, start: Start) -> None:
    report, agreed = initiate(shm_dir, start, [BadCable(), ZmqCandidate()], ["shm", "zmq"])
    assert report.transport == agreed == "zmq"
    assert report.rejected["shm"] == "4096 bytes came back changed"


def test_nothing_works(shm_dir: Path) -> None:
    with RunDir.create(shm_dir) as run:
        with pytest.raises(ResourceError, match=r"no transport works.*not enough shared memory"):
            probe.initiate(run, "link", [TooLargeShm()])
        with pytest.raises(PeerLost, match="did not come"):
            probe.initiate(run, "link", timeout=0.1)
        with pytest.raises(PeerLost, match="no verdict"):
            probe.respond(run, "link", timeout=0.1)


def test_report_for_people(shm_dir: Path) -> None:
    described = probe.describe(shm_dir)
    assert list(described) == ["shm", "zmq"]
    assert all("works, round trip" in text for text in described.values())
    assert probe.describe(shm_dir / "nowhere")["shm"].endswith("No such file or directory")
