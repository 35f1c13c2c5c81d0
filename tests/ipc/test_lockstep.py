from __future__ import annotations

from pathlib import Path

import pytest

from ipc.lockstep import Lockstep
from ipc.rundir import RunDir
from ipc.shm_channel import ShmChannel
from ssd_pipe.errors import PeerLost, ResourceError
from tests.ipc.conftest import Start


def fail() -> None:
    raise ResourceError("mine")


def test_both_sides_hear_of_every_step(shm_dir: Path, start: Start) -> None:
    with RunDir.create(shm_dir, "r") as run:
        child = start("keep_step", shm_dir, "r")
        out, back = ShmChannel.open(run, "there"), ShmChannel.open(run, "back")
        link = Lockstep(out, back, first=True)
        assert link.together(lambda: b"one") == b"two"
        with pytest.raises(ResourceError, match=r"^mine$"):
            link.both(fail)
        with pytest.raises(ResourceError, match=r"^other side: theirs$"):
            link.together()
        assert child.communicate()[0].split("\n")[:3] == ["one", "other side: mine", "theirs"]
        with pytest.raises(PeerLost, match=r"did not answer within 0\.05 s"):
            link.together(timeout=0.05)
        with pytest.raises(PeerLost, match=r"did not answer within 0\.05 s"):
            link.together()


def test_waiting_heeds_the_stop(shm_dir: Path) -> None:
    class Stopped(Exception):
        pass

    def check() -> None:
        raise Stopped

    with RunDir.create(shm_dir, "r") as run:
        channel = ShmChannel.open(run, "there")
        with pytest.raises(Stopped):
            Lockstep(channel, channel, True, check).together()
