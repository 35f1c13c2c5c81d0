"""Ways for bytes to get from one process's GPU to another's, tried in order of preference.

A probe has two sides, one in each process. Every transport has to bring random bytes there and back
before it counts.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ipc.errors import ResourceError, SsdPipeError
from ipc.lockstep import ANSWER_TIMEOUT, Lockstep
from ipc.probe import ProbeReport
from ipc.segments import create_segment, open_segment
from models.cuda.ipc_memory import DeviceMemory, device_uuid, register_host, unregister_host

PAYLOADS = (8, 4096, 1 << 20)  # bytes, each with its own random content
ROUND_TRIPS = 50
WORD_TIMEOUT = 5.0  # seconds for one word to arrive
_WORD = 8  # bytes
_LARGEST = max(PAYLOADS)


class Wire(Protocol):
    """An open transport, as one side sees it.

    Attributes:
        rendezvous: ``receive`` must run while the other side sends, not after.
    """

    rendezvous: bool

    def send(self, data: torch.Tensor) -> None:
        """Bring int64 [n] to the other side."""

    def receive(self, words: int) -> torch.Tensor:
        """int64 [words] on the host: what the other side sent last."""


class DeviceTransport(Protocol):
    """A way that may or may not work between two processes' devices."""

    @property
    def name(self) -> str:
        """As it is reported."""

    def open(self, link: Lockstep, device: torch.device, stack: ExitStack) -> Wire:
        """Both sides call it. Raises ResourceError, on both sides, if it does not work; what it
        took is given back as ``stack`` unwinds."""


class CudaIpc:
    """Each side maps a piece of the other's device memory and copies to it."""

    name = "cuda-ipc"
    rendezvous = False

    def open(self, link: Lockstep, device: torch.device, stack: ExitStack) -> CudaIpc:
        freed, unmapped = stack.enter_context(ExitStack()), ExitStack()

        def leave() -> None:
            """Both unmap before either frees what it exported."""
            unmapped.close()
            with suppress(SsdPipeError):
                link.together()

        def export() -> bytes:
            _need_gpu(device)
            self._own = DeviceMemory.allocate(_LARGEST, device)
            freed.callback(self._own.close)
            return self._own.handle()

        def map_peer(handle: bytes) -> None:
            self._peer = DeviceMemory.open(handle, _LARGEST, device)
            unmapped.callback(self._peer.close)

        stack.callback(leave)
        link.both(partial(map_peer, link.together(export)))
        return self

    def send(self, data: torch.Tensor) -> None:
        self._peer.copy_from(data)

    def receive(self, words: int) -> torch.Tensor:
        return torch.from_numpy(self._own.read(words))


class Nccl:
    """Send and receive of a communicator of the two processes."""

    name = "nccl"
    rendezvous = True

    def __init__(self, meeting: Path) -> None:
        """``meeting``: a path that does not exist yet, on a file system both sides see."""
        self._meeting = meeting

    def open(self, link: Lockstep, device: torch.device, stack: ExitStack) -> Nccl:
        self._device, self._peer = device, int(link.first)

        def identify() -> bytes:
            _need_gpu(device)
            return device_uuid(device).encode()

        def join() -> None:
            self._group = _nccl_pair(self._meeting, 1 - self._peer, device)
            stack.callback(self._group.shutdown)

        if link.together(identify) == identify():
            raise ResourceError("both processes compute on the same GPU")
        stack.callback(self._meeting.unlink, missing_ok=True)
        link.both(join)
        return self

    def send(self, data: torch.Tensor) -> None:
        self._group.send([data], self._peer, 0).wait()
        torch.cuda.synchronize(self._device)

    def receive(self, words: int) -> torch.Tensor:
        data = torch.zeros(words, dtype=torch.int64, device=self._device)
        self._group.recv([data], self._peer, 0).wait()
        return data.cpu()


class SharedMemory:
    """Host memory that both processes map, page-locked where there is a GPU."""

    name = "shm"
    rendezvous = False

    def __init__(self, path: Path) -> None:
        """``path``: a file that does not exist yet, in shared memory."""
        self._path = path

    def open(self, link: Lockstep, device: torch.device, stack: ExitStack) -> SharedMemory:
        def create() -> None:
            if link.first:
                self._map = create_segment(self._path, 2 * _LARGEST).view(np.int64)
                stack.callback(self._path.unlink, missing_ok=True)

        def share() -> None:
            if not link.first:
                self._map = open_segment(self._path, 2 * _LARGEST).view(np.int64)
            if device.type == "cuda":
                register_host(self._map, device)
                stack.callback(unregister_host, self._map)

        link.both(create)
        link.both(share)
        self._device = device
        halves = self._map.reshape(2, -1)
        self._out, self._in = (
            torch.from_numpy(half) for half in (halves if link.first else halves[::-1])
        )
        return self

    def send(self, data: torch.Tensor) -> None:
        self._out[: len(data)].copy_(data)

    def receive(self, words: int) -> torch.Tensor:
        return self._in[:words].to(self._device).cpu().clone()


def ladder(folder: Path, link: str) -> tuple[DeviceTransport, ...]:
    """Every transport, the best first; ``folder`` is in shared memory, ``link`` unique there."""
    return (CudaIpc(), Nccl(folder / f"{link}.nccl"), SharedMemory(folder / f"{link}.pages"))


def climb(
    link: Lockstep,
    device: torch.device,
    transports: Sequence[DeviceTransport],
    try_all: bool = False,
) -> ProbeReport:
    """One side of the probe; the other runs it with the same arguments.

    Round trips are those of one word from GPU to GPU and back, the hosts copying. ``try_all``
    measures every transport, for reports. The report's transport is empty if nothing works. Raises
    PeerLost.
    """
    round_trips: dict[str, float] = {}
    rejected: dict[str, str] = {}
    for transport in transports:
        if round_trips and not try_all:
            break
        try:
            with ExitStack() as stack:
                wire = transport.open(link, device, stack)
                for nbytes in PAYLOADS:
                    _carry(link, wire, device, nbytes)
                seconds = _round_trip(link, wire, device)
                round_trips[transport.name] = round(seconds * 1e6, 1)
        except ResourceError as error:
            rejected[transport.name] = str(error)
    return ProbeReport(next(iter(round_trips), ""), round_trips, rejected)


def _carry(link: Lockstep, wire: Wire, device: torch.device, nbytes: int) -> None:
    """Random bytes of the first side's go there and back."""
    words = nbytes // _WORD
    sent = torch.from_numpy(np.frombuffer(os.urandom(nbytes), np.int64).copy()).to(device)
    came: list[torch.Tensor] = []

    def give() -> None:
        wire.send(came[0].to(device) if came else sent)

    def take() -> None:
        came.append(wire.receive(words))

    def compare() -> None:
        if link.first and not torch.equal(came[0], sent.cpu()):
            raise ResourceError(f"{nbytes} bytes came back changed")

    for sends in (link.first, not link.first):
        if wire.rendezvous:
            link.both(give if sends else take)
        else:
            link.both(give if sends else _nothing)
            link.both(_nothing if sends else take)
    link.both(compare)


def _round_trip(link: Lockstep, wire: Wire, device: torch.device) -> float:
    """Median seconds of a word there and back, the two sides in step through the wire alone."""
    times = []

    def rally() -> None:
        for number in range(1, ROUND_TRIPS + 1):
            word = torch.full((1,), number, device=device)
            start = time.perf_counter()
            if link.first:
                wire.send(word)
            _await_word(wire, number)
            if not link.first:
                wire.send(word)
            times.append(time.perf_counter() - start)

    link.both(rally)
    return statistics.median(times)


def _await_word(wire: Wire, number: int) -> None:
    deadline = time.monotonic() + WORD_TIMEOUT
    while int(wire.receive(1)[0]) != number:
        if wire.rendezvous or time.monotonic() > deadline:
            raise ResourceError(f"word {number} of {ROUND_TRIPS} did not arrive")


def _nothing() -> None:
    pass


def _need_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise ResourceError(f"no GPU: this process computes on {device}")


def _nccl_pair(meeting: Path, rank: int, device: torch.device) -> torch.distributed.ProcessGroup:
    """A communicator of two ranks, beside any other group this process is in."""
    from torch import distributed

    store = distributed.FileStore(str(meeting), 2)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=ANSWER_TIMEOUT / 2)
    with _blocking_nccl(), torch.cuda.device(device):
        backend = distributed.ProcessGroupNCCL(store, rank, 2, options)
        backend._set_sequence_number_for_group()
        backend.eager_connect_single_device(device)
    group = distributed.ProcessGroup(store, rank, 2)
    group._set_default_backend(distributed.ProcessGroup.BackendType.NCCL)
    group._register_backend(device, distributed.ProcessGroup.BackendType.NCCL, backend)
    return group


@contextmanager
def _blocking_nccl() -> Iterator[None]:
    """A communicator made inside raises what goes wrong where it is waited for, instead of ending
    the process from a thread of its own."""
    wanted = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
