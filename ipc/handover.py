"""Draft distributions of the chain under verification, from the draft to target rank 0.

Only the rejection rule needs them. The draft copies the rows of the chosen branch here while the
target's forward pass runs; the target takes them at the end of it, before the next plan goes out.

A slot has one buffer. Nothing is overwritten while it is read, because of the order of plans: the
draft writes for a plan only after it has got it, the scheduler sends it that plan only after the
target's result of the step before, and that result is made after the rows were used. A draft that
is late writes its plans' rows in their order, and the target, which waits for one number, takes
those of no other; a draft that takes another's place begins when the other is gone. Each of several
draft workers has a segment of its own; the number says whose it is (``engine.partition``).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ipc.doorbell import Doorbell
from ipc.running_time import RunningTime
from ipc.segments import create_or_open_segment, open_segment

_TURN = 0.1  # seconds; of a wait for rows
_HEADER = 16  # bytes a slot: int64 number, int64 rows (-1: the draft has lost them)


class Handover:
    """Shared [slots, K, V] float32 with a number and a row count beside each slot's rows."""

    def __init__(self, memory: np.ndarray, slots: int, k: int, vocab: int, bell: Doorbell) -> None:
        self._header = memory[: slots * _HEADER].view(np.int64).reshape(slots, 2)
        rows = memory[slots * _HEADER :].view(np.float32)
        self._rows = rows[: slots * k * vocab].reshape(slots, k, vocab)
        self._bell = bell

    @staticmethod
    def size_bytes(slots: int, k: int, vocab: int) -> int:
        return slots * (_HEADER + 4 * k * vocab)

    @classmethod
    def create(cls, path: Path, bell: Doorbell, slots: int, k: int, vocab: int) -> Handover:
        """The writing side; takes over from a writer that is gone. Numbers must not come again."""
        memory = create_or_open_segment(path, cls.size_bytes(slots, k, vocab))
        return cls(memory, slots, k, vocab, bell)

    @classmethod
    def open(cls, path: Path, bell: Doorbell, slots: int, k: int, vocab: int) -> Handover:
        """The reading side."""
        memory = open_segment(path, cls.size_bytes(slots, k, vocab))
        return cls(memory, slots, k, vocab, bell)

    def put(self, slot: int, number: int, rows: np.ndarray | None) -> None:
        """Hand over float32 [n, W], zeros beyond token W, or None if they are lost."""
        if rows is not None:
            width = rows.shape[1]
            self._rows[slot, : len(rows), :width] = rows
            self._rows[slot, : len(rows), width:] = 0
        # The number goes last: it tells the reader that the rows before it are whole.
        self._header[slot, 1] = -1 if rows is None else len(rows)
        self._header[slot, 0] = number
        self._bell.ring()

    def take(self, slot: int, number: int, length: int, timeout: float) -> np.ndarray | None:
        """The rows [length, V] of hand-over ``number`` (a view), None if lost or too late."""
        clock: RunningTime | None = None
        while not self.arrived(slot, number):
            clock = clock or RunningTime(_TURN)
            left = timeout - clock.read()
            if not self._bell.wait(max(0.0, min(left, _TURN))) and left <= 0:
                return None
        if self._header[slot, 1] < length:
            return None
        return self._rows[slot, :length]

    def arrived(self, slot: int, number: int) -> bool:
        """Whether hand-over ``number`` has been made, be it to say that the rows are lost."""
        return bool(self._header[slot, 0] == number)
