"""The other side of test_transports, in a process of its own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from ipc.lockstep import Lockstep
from ipc.rundir import RunDir
from ipc.shm_channel import ShmChannel
from models.cuda.transports import DeviceTransport, SharedMemory, Wire, climb
from ssd_pipe.errors import ResourceError

CPU = torch.device("cpu")


class BadCable:
    """Shared memory that loses a bit of the first side's long messages."""

    name = "bad-cable"

    def __init__(self, path: Path) -> None:
        self._memory = SharedMemory(path)

    def open(self, link: Lockstep, device: torch.device, stack: ExitStack) -> Wire:
        wire = self._memory.open(link, device, stack)
        return BitFlip(wire) if link.first else wire


class BitFlip:
    rendezvous = False

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.receive = wire.receive

    def send(self, data: torch.Tensor) -> None:
        if len(data) > 100:
            data = data.clone()
            data[-1] ^= 1
        self._wire.send(data)


class Broken:
    """Works on one side only."""

    name = "broken"

    def __init__(self, mine: bool) -> None:
        self._mine = mine

    def open(self, link: Lockstep, device: torch.device, stack: ExitStack) -> Wire:
        def act() -> None:
            if link.first == self._mine:
                raise ResourceError("no such cable")

        link.both(act)
        raise AssertionError("one side had failed")


def transports(folder: Path) -> list[DeviceTransport]:
    """One that the first side cannot open, one that the other cannot, a bad one, a good one."""
    return [
        Broken(True),
        Broken(False),
        BadCable(folder / "bad.pages"),
        SharedMemory(folder / "good.pages"),
    ]


def side(shm_dir: str, first: bool) -> None:
    """Leaves the transport it agrees on in ``agreed-<first>`` beside the runs."""
    torch.set_num_threads(1)
    with RunDir.open(shm_dir, "r") as run:
        link = Lockstep(ShmChannel.open(run, "back"), ShmChannel.open(run, "there"), first)
        link.together(timeout=60)
        report = climb(link, CPU, transports(run.path))
        (Path(shm_dir) / "agreed").write_text(f"{report.transport} {sorted(report.rejected)}")
