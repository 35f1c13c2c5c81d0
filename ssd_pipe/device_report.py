"""Which way bytes would take between the devices of target and draft, tried by two processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec

from ipc.probe import ProbeReport
from ipc.rundir import RunDir
from ssd_pipe.errors import PeerLost, SsdPipeError
from ssd_pipe.gpu_count import usable_gpus

DEADLINE = 150.0  # seconds for both processes: they import torch, and NCCL may take its time


def describe(shm_dir: str | Path) -> dict[str, str]:
    """Every transport between the first two GPUs (or one with itself), for people."""
    count = usable_gpus()
    if not count:
        return {"devices": "no GPU that torch can use"}
    devices = ("cuda:0", f"cuda:{min(1, count - 1)}")
    facts = {"devices": " and ".join(devices)}
    try:
        report = probe_devices(shm_dir, devices)
    except SsdPipeError as error:
        return facts | {"error": str(error)}
    facts["takes"] = report.transport or "none"
    facts |= {n: f"works, round trip {us:g} us" for n, us in report.round_trips.items()}
    return facts | {n: f"does not work: {why}" for n, why in report.rejected.items()}


def probe_devices(shm_dir: str | Path, devices: tuple[str, str]) -> ProbeReport:
    """Two processes, one on each of ``devices``, try every transport; uses a run of its own.

    Raises PeerLost if one of them fails, ResourceError if there can be no run.
    """
    with RunDir.create(shm_dir) as rundir:
        module = [sys.executable, "-m", "procs.device_probe", str(shm_dir), rundir.name]
        children = [
            subprocess.Popen(
                [*module, str(side), device],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for side, device in enumerate(devices)
        ]
        deadline = time.monotonic() + DEADLINE
        try:
            outputs = [c.communicate(timeout=deadline - time.monotonic()) for c in children]
        except subprocess.TimeoutExpired:
            raise PeerLost(f"device probe: no answer within {DEADLINE:g} s") from None
        finally:
            for child in children:
                child.kill()
                child.wait()
    for side, (child, (_, errors)) in enumerate(zip(children, outputs, strict=True)):
        if child.returncode:
            lines = errors.strip().splitlines() or [f"exit status {child.returncode}"]
            raise PeerLost(f"device probe, {devices[side]}: {lines[-1]}")
    return msgspec.json.decode(outputs[0][0], type=ProbeReport)
