"""How target rank 0 and the draft can exchange bytes between their devices, found out at start-up.

CUDA IPC if their GPUs reach each other, else NCCL, else page-locked host memory. Rounds whose
speculation cache lies in device memory need CUDA IPC; with anything else they pass through the
scheduler and host memory.

Run as a module it is one side of a probe for reports:
``python -m procs.device_probe SHM_DIR RUN SIDE DEVICE``; side 0 prints what it found as JSON.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import msgspec
import torch

from ipc.channel import Channel
from ipc.lockstep import Lockstep
from ipc.probe import ProbeReport, directions
from ipc.rundir import RunDir
from ipc.shm_channel import ShmChannel
from ipc.zmq_channel import ZmqChannel
from models.cuda.transports import climb, ladder
from procs.runtime import Runtime
from ssd_pipe.errors import PeerLost
from ssd_pipe.gpu_assignment import physical_gpu

LINK = "device-probe"
CAPACITY = 1 << 16  # bytes a direction
FLUSH_MS = 1000  # what closing may spend on delivering the last message
MEETING_TIMEOUT = 60.0  # seconds two processes of a report may take to start


def agree(runtime: Runtime, device: torch.device) -> ProbeReport:
    """Probe together with the other side: target rank 0 and the draft both call it.

    The result goes to the log and into ``runtime.notes``. Raises PeerLost if the other side does
    not come, Stopping if asked to stop meanwhile.
    """
    first = runtime.role == "target"
    with ExitStack() as stack:
        out, back = _channels(runtime, first)
        stack.callback(out.close)
        stack.callback(back.close)
        link = Lockstep(out, back, first, runtime.stopping.check)
        try:
            link.together(timeout=runtime.config.run.ready_timeout)
            report = climb(link, device, ladder(runtime.rundir.path, LINK))
        except PeerLost as error:
            other = "draft" if first else "target-0"
            raise PeerLost(f"device probe with {other}: {error}", other) from None
    runtime.log.info(
        "device transport",
        chosen=report.transport or "none",
        round_trip_us=report.round_trips.get(report.transport),
        rejected=report.rejected,
    )
    runtime.note_transport("device transport", report)
    return report


def describe_device(device: torch.device) -> str:
    """For people: a GPU with what the machine calls it, as in "cuda:1 (GPU 3)"."""
    if device.type != "cuda":
        return str(device)
    return f"{device} (GPU {physical_gpu(device.index or 0)})"


def _channels(runtime: Runtime, first: bool) -> tuple[Channel, Channel]:
    out, back = directions(LINK, first)
    rundir, stop = runtime.rundir, runtime.stopping.fileno()
    if runtime.transport == "shm":
        sender = ShmChannel.open(rundir, out, CAPACITY)
        return sender, ShmChannel.open(rundir, back, CAPACITY, stop_fd=stop)
    receiver = ZmqChannel.receiver(rundir.endpoint(back), stop)
    return ZmqChannel.sender(rundir.endpoint(out), linger_ms=FLUSH_MS), receiver


def _main(shm_dir: str, run: str, side: str, device: str) -> None:
    first = side == "0"
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    with RunDir.open(shm_dir, run) as rundir:
        out, back = (ShmChannel.open(rundir, name, CAPACITY) for name in directions(LINK, first))
        link = Lockstep(out, back, first)
        link.together(timeout=MEETING_TIMEOUT)
        report = climb(link, where, ladder(rundir.path, LINK), try_all=True)
        if first:
            print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
