"""Shared-memory ring: one producer, one consumer, records of any length, no locks.

Layout, in 8-byte words: magic, capacity; at byte 64 the head (bytes consumed), at byte 128 the
tail (bytes produced), each on its own cache line; records from byte 192. A record is one length
word and the payload padded to 8 bytes; it may wrap around the end. Head and tail only grow.
"""

from __future__ import annotations

import platform
import struct
import time
from pathlib import Path

from ipc.errors import PeerLost, ResourceError
from ipc.running_time import RunningTime
from ipc.segments import Segment

_MAGIC = 0x3147_4E49_5244_5353  # "SSDRING1", little-endian
_HEAD, _TAIL = 8, 16  # word indices
_HEADER = 192
_FIRST_NAP, _LONGEST_NAP = 20e-6, 2e-3  # seconds
_TURN = 0.05  # seconds from nap to nap, at most, on a machine that has other things to do


class Ring:
    """A record becomes visible when the tail is written, so a dead producer leaves no half record.

    One process calls ``send`` and one calls ``recv``, each from one thread.

    Attributes:
        capacity: bytes of record space; the longest record is ``capacity - 8`` bytes.
    """

    def __init__(self, segment: Segment) -> None:
        """Use ``create``, ``open`` or ``create_or_open``."""
        # Payload before tail is x86-64's store order. Other machines need fences that Python
        # cannot issue; there the start-up probe falls through to the next transport.
        if platform.machine() not in {"x86_64", "AMD64"}:
            raise ResourceError(f"shared-memory rings need x86-64, this is {platform.machine()}")
        self._segment = segment
        size = len(segment.map)
        if size < _HEADER + 8 or size % 8:
            raise ResourceError(f"{segment.path}: not a ring")
        self._bytes = memoryview(segment.map)
        self._words = self._bytes.cast("Q")
        self.capacity = size - _HEADER
        if self._words[0] != _MAGIC or self._words[1] != self.capacity:
            raise ResourceError(f"{segment.path}: not a ring")
        self._data = self._bytes[_HEADER:]
        self._head: int = self._words[_HEAD]
        self._tail: int = self._words[_TAIL]

    @classmethod
    def create(cls, path: Path, capacity: int) -> Ring:
        """Make a ring of at least ``capacity`` bytes.

        Raises ResourceError if the path exists or shared memory is short.
        """
        capacity = _rounded(capacity)
        segment = Segment.create(path, _HEADER + capacity)
        segment.map[:16] = _header(capacity)
        return cls(segment)

    @classmethod
    def open(cls, path: Path) -> Ring:
        """Map an existing ring. Raises ResourceError if there is none."""
        return cls(Segment.open(path))

    @classmethod
    def create_or_open(cls, path: Path, capacity: int) -> Ring:
        """Map the ring, made if missing; either side may come first.

        Raises ResourceError if the ring there has another capacity, or shared memory is short.
        """
        capacity = _rounded(capacity)
        return cls(Segment.create_or_open(path, _header(capacity), _HEADER + capacity))

    def send(self, record: bytes | bytearray, timeout: float = 10.0) -> None:
        """Append a record, waiting up to ``timeout`` seconds for room.

        Raises:
            ResourceError: the record can never fit.
            PeerLost: no room in time; the consumer has stopped reading.
        """
        size = len(record)
        need = 8 + (size + 7 & ~7)
        if need > self.capacity:
            raise ResourceError(
                f"{self._segment.path}: a record of {size} bytes does not fit a ring of "
                f"{self.capacity} bytes"
            )
        if self.capacity - (self._tail - self._words[_HEAD]) < need:
            self._wait_for_room(need, timeout)
        at = self._tail % self.capacity
        self._words[(_HEADER + at) // 8] = size
        at = (at + 8) % self.capacity
        first = min(size, self.capacity - at)
        if first == size:
            self._data[at : at + size] = record
        else:
            self._data[at:] = record[:first]
            self._data[: size - first] = record[first:]
        self._tail += need
        self._words[_TAIL] = self._tail

    def recv(self) -> bytes | None:
        """The oldest record, or None if there is none. Raises PeerLost if the ring is damaged."""
        ready = self._words[_TAIL] - self._head
        if not ready:
            return None
        at = self._head % self.capacity
        size = self._words[(_HEADER + at) // 8]
        need = 8 + (size + 7 & ~7)
        if need > ready or ready > self.capacity:
            raise PeerLost(f"{self._segment.path}: damaged ring: {size}-byte record of {ready}")
        at = (at + 8) % self.capacity
        first = min(size, self.capacity - at)
        record = bytes(self._data[at : at + first])
        if first < size:
            record += bytes(self._data[: size - first])
        self._head += need
        self._words[_HEAD] = self._head
        return record

    def empty(self) -> bool:
        """Whether every record has been consumed. Either side may ask."""
        return bool(self._words[_TAIL] == self._words[_HEAD])

    def close(self) -> None:
        """Unmap; records stay for the other side. Idempotent."""
        for view in (self._data, self._words, self._bytes):
            view.release()
        self._segment.close()

    def _wait_for_room(self, need: int, timeout: float) -> None:
        clock = RunningTime(_TURN)
        nap = _FIRST_NAP
        while self.capacity - (self._tail - self._words[_HEAD]) < need:
            if clock.read() >= timeout:
                raise PeerLost(f"{self._segment.path}: ring full for {timeout:g} s")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)


def _rounded(capacity: int) -> int:
    if capacity <= 0:
        raise ResourceError(f"a ring needs at least one byte, got {capacity}")
    return max(64, capacity + 7 & ~7)


def _header(capacity: int) -> bytes:
    return struct.pack("<QQ", _MAGIC, capacity)
