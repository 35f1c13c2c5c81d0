"""Start-up of leased rounds: GPU memory shared by target rank 0 and draft, and the records.

The target offers memory of its GPU and registers the records with it; the draft maps the memory,
and both move bytes through it before either says that it works. A file of the run directory
carries each one's word. Where it cannot work (no GPU, one GPU for both, no peer access, tensor
parallelism, another rule), the pipeline runs through the scheduler, and the log says why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import torch

from ipc.round_records import CLOCK_MARK, RoundRecords
from ipc.running_time import RunningTime
from procs import channels
from procs.runtime import Runtime
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.errors import ResourceError
from ssd_pipe.leased_rounds import unsupported

if TYPE_CHECKING:  # Triton is not everywhere
    from models.cuda.ipc_memory import DeviceMemory
    from models.cuda.rounds.tables import RoundTables

OFFER, ANSWER = "leased-rounds.offer", "leased-rounds.answer"
FACT = "leased_rounds"
"""Fact that target and draft report: 1 if they can."""
_PATTERN = 8  # words moved each way
_POLL = 0.02  # seconds
CLOCK_AGE = 1.0  # seconds after which the two clocks are compared again
_CLOCK_TRIES = 3
ANY = -1  # in place of a pid: whichever target there is


class _Word(msgspec.Struct):
    """One side's word: why not, or (the target's) where its memory is.

    ``pid``: the target's that it is about; words of a group that was here before do not count.
    """

    reason: str = ""
    handle: bytes = b""
    nbytes: int = 0
    gpu: str = ""
    pid: int = 0


class _Link:
    """What both sides of a link have.

    Attributes:
        tables: for the kernels; None where leases are not possible.
        records: None likewise.
        reason: why not, empty if they are possible.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.tables: RoundTables | None = None
        self.records: RoundRecords | None = None
        self.reason = ""
        self._words: npt.NDArray[np.int64] | None = None

    def close(self) -> None:
        """The records are no longer the GPU's; no kernel may use them any more."""
        words, self._words = self._words, None
        if words is not None:
            from models.cuda.ipc_memory import unregister_host

            torch.cuda.synchronize(self._device)
            unregister_host(words)


class TargetLink(_Link):
    """The side of target rank 0, in ssd."""

    def __init__(self, runtime: Runtime, sizes: Dimensions, device: torch.device) -> None:
        """Make the offer. Does not wait."""
        super().__init__(device)
        self._runtime = runtime
        self.reason = unsupported(runtime.config, device.type)
        self._memory: DeviceMemory | None = None
        self._clock_at = 0.0
        if not self.reason:
            try:
                self._offer(sizes)
                return
            except ResourceError as error:
                self.tables, self.reason = None, str(error)
        _say(runtime, OFFER, _Word(reason=f"target: {self.reason}", pid=os.getpid()))

    def _offer(self, sizes: Dimensions) -> None:
        from models.cuda.ipc_memory import DeviceMemory, device_uuid, register_host
        from models.cuda.rounds.layout import table_words

        runtime, slots, k = self._runtime, sizes.slots, sizes.k
        records = RoundRecords.create(runtime.rundir.segment(channels.RECORDS), slots, k)
        words = register_host(records.words, self._device)
        self._words = records.words
        nbytes = 8 * (slots * table_words(sizes.branches, k) + 2 * _PATTERN)
        memory = DeviceMemory.allocate(nbytes, self._device)
        memory.write(_pattern(), _place(nbytes))
        self.tables = _tables(memory, sizes, records, words)
        self._memory, self.records = memory, records
        gpu = device_uuid(self._device)
        word = _Word(handle=memory.handle(), nbytes=nbytes, gpu=gpu, pid=os.getpid())
        _say(runtime, OFFER, word)

    def confirm(self) -> bool:
        """Wait for the draft's answer; whether leases are possible. Raises ResourceError if no
        answer comes."""
        if self._memory is None:
            return False
        answer = _hear(self._runtime, ANSWER, lambda word: word.pid in (ANY, os.getpid()))
        if not answer.reason:
            written = self._memory.read(_PATTERN, _place(self._memory.nbytes) + _PATTERN)
            if not np.array_equal(written, -_pattern()):
                answer.reason = "what the draft wrote did not arrive"
        self.reason = answer.reason
        if self.reason:
            self.records = None
        return not self.reason

    def set_clock(self) -> None:
        """Compare the GPU's clock with the host's, if that was a while ago."""
        now = time.monotonic()
        if self.records is None or self.tables is None or self.tables.control is None:
            return
        if self._clock_at and now - self._clock_at < CLOCK_AGE:
            return
        from models.cuda.rounds.clock import write_clock

        control = self.records.control
        offsets: list[int] = []
        mark = self.tables.control[CLOCK_MARK : CLOCK_MARK + 1]
        on = torch.empty(1, device=self._device)
        for _ in range(_CLOCK_TRIES):
            control[CLOCK_MARK] = 0
            write_clock(mark, on)
            while not control[CLOCK_MARK] and time.monotonic() < now + CLOCK_AGE:
                pass
            if control[CLOCK_MARK]:  # else the GPU is busy with something long
                offsets.append(time.monotonic_ns() - int(control[CLOCK_MARK]))
        if offsets:
            self.records.clock_ns = min(offsets)
            self._clock_at = now


class DraftLink(_Link):
    """The draft's side, in ssd."""

    def __init__(self, runtime: Runtime, sizes: Dimensions, device: torch.device) -> None:
        """Wait for the target's offer and answer it. Raises ResourceError if none comes."""
        super().__init__(device)
        self.reason = unsupported(runtime.config, device.type)
        if self.reason:
            _say(runtime, ANSWER, _Word(reason=f"draft: {self.reason}", pid=ANY))
            return
        from models.cuda.ipc_memory import device_uuid

        offer = _hear(runtime, OFFER, lambda word: psutil.pid_exists(word.pid))
        self.reason = offer.reason
        if not self.reason and offer.gpu == device_uuid(device):
            # A kernel that waits would keep the draft's from running.
            self.reason = "target and draft share a GPU"
        if not self.reason:
            try:
                self._take(runtime, sizes, device, offer)
            except ResourceError as error:
                self.reason = f"draft: {error}"
        _say(runtime, ANSWER, _Word(reason=self.reason, pid=offer.pid))

    def _take(
        self, runtime: Runtime, sizes: Dimensions, device: torch.device, offer: _Word
    ) -> None:
        from models.cuda.ipc_memory import DeviceMemory, register_host

        memory = DeviceMemory.open(offer.handle, offer.nbytes, device)
        place = _place(offer.nbytes)
        if not np.array_equal(memory.read(_PATTERN, place), _pattern()):
            raise ResourceError("what the target wrote did not arrive")
        memory.write(-_pattern(), place + _PATTERN)
        path = runtime.rundir.segment(channels.RECORDS)
        records = RoundRecords.open(path, sizes.slots, sizes.k)
        words = register_host(records.words, device)
        self._words = records.words
        self.tables = _tables(memory, sizes, records, words)
        self.records = records


def _tables(
    memory: DeviceMemory, sizes: Dimensions, records: RoundRecords, words: torch.Tensor
) -> RoundTables:
    """``words``: those of the records, as the GPU sees them."""
    from models.cuda.rounds.tables import RoundTables

    mail, ring = records.control.size, records.control.size + records.mail.size
    return RoundTables(
        memory,
        sizes.branches,
        sizes.k,
        sizes.vocab_size,
        control=words[:mail],
        mail=words[mail:ring],
        records=words[ring:],
        max_rows=sizes.slots,
    )


def _pattern() -> npt.NDArray[np.int64]:
    return np.arange(1, _PATTERN + 1, dtype=np.int64)


def _place(nbytes: int) -> int:
    """First word of what is moved for a test: behind the cache, so that a draft that comes in the
    place of another one finds it too."""
    return nbytes // 8 - 2 * _PATTERN


def _path(runtime: Runtime, name: str) -> Path:
    return runtime.rundir.path / name


def _say(runtime: Runtime, name: str, word: _Word) -> None:
    path = _path(runtime, name)
    fresh = path.with_name(f".{name}-{os.getpid()}")
    try:
        fresh.write_bytes(msgspec.msgpack.encode(word))
        fresh.rename(path)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}") from None


def _hear(runtime: Runtime, name: str, meant: Callable[[_Word], bool]) -> _Word:
    """The other side's word, once one that is ``meant`` for us is there.

    Raises Stopping, ResourceError.
    """
    path = _path(runtime, name)
    clock = RunningTime(_POLL)
    while True:
        if path.exists():
            word = msgspec.msgpack.decode(path.read_bytes(), type=_Word)
            if meant(word):
                return word
        runtime.stopping.wait(_POLL)
        runtime.stopping.check()
        if clock.read() > runtime.config.run.ready_timeout:
            raise ResourceError(f"{path}: the other process has not said anything")
