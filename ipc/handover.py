"""Draft distributions of the chain under verification, from the draft to target rank 0.

Only the rejection rule needs them. The draft copies the rows of the chosen branch here while the
target's forward pass runs; the target takes them at the end of it, before the next plan goes out.
A slot has two buffers, chosen by the parity of the hand-over number. Numbers rise over all slots,
so both may serve or only one: what keeps rows from being overwritten while they are read is that
the draft gets its next plan after the target's result. Each of several draft workers has a segment
of its own; the number says whose it is (``engine.partition``).
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from ipc.doorbell import Doorbell
from ipc.segments import create_or_open_segment, open_segment

_HEADER = 16  # bytes a buffer: int64 number, int64 rows (-1: the draft has lost them)


class Handover:
    """Shared [slots, 2, K, V] float32 with a number and a row count beside each buffer.

    ``workers``: draft workers; the numbers of one segment are so far apart.
    """

    def __init__(
        self, memory: np.ndarray, slots: int, k: int, vocab: int, bell: Doorbell, workers: int = 1
    ) -> None:
        self._header = memory[: slots * 2 * _HEADER].view(np.int64).reshape(slots, 2, 2)
        rows = memory[slots * 2 * _HEADER :].view(np.float32)
        self._rows = rows[: slots * 2 * k * vocab].reshape(slots, 2, k, vocab)
        self._bell = bell
        self._workers = workers

    @staticmethod
    def size_bytes(slots: int, k: int, vocab: int) -> int:
        return slots * 2 * (_HEADER + 4 * k * vocab)

    @classmethod
    def create(
        cls, path: Path, bell: Doorbell, slots: int, k: int, vocab: int, workers: int = 1
    ) -> Handover:
        """The writing side; takes over from a writer that is gone. Numbers must not come again."""
        memory = create_or_open_segment(path, cls.size_bytes(slots, k, vocab))
        return cls(memory, slots, k, vocab, bell, workers)

    @classmethod
    def open(
        cls, path: Path, bell: Doorbell, slots: int, k: int, vocab: int, workers: int = 1
    ) -> Handover:
        memory = open_segment(path, cls.size_bytes(slots, k, vocab))
        return cls(memory, slots, k, vocab, bell, workers)

    def put(self, slot: int, number: int, rows: np.ndarray | None) -> None:
        """Hand over float32 [n, W], zeros beyond token W, or None if they are lost."""
        side = self._side(number)
        if rows is not None:
            width = rows.shape[1]
            self._rows[slot, side, : len(rows), :width] = rows
            self._rows[slot, side, : len(rows), width:] = 0
        # The number goes last: it tells the reader that the rows before it are whole.
        self._header[slot, side, 1] = -1 if rows is None else len(rows)
        self._header[slot, side, 0] = number
        self._bell.ring()

    def take(self, slot: int, number: int, length: int, timeout: float) -> np.ndarray | None:
        """The rows [length, V] of hand-over ``number`` (a view), None if lost or too late."""
        deadline = time.monotonic() + timeout
        while not self.arrived(slot, number):
            left = deadline - time.monotonic()
            if not self._bell.wait(max(0.0, left)) and left <= 0:
                return None
        side = self._side(number)
        if self._header[slot, side, 1] < length:
            return None
        return self._rows[slot, side, :length]

    def arrived(self, slot: int, number: int) -> bool:
        """Whether hand-over ``number`` has been made, be it to say that the rows are lost."""
        return bool(self._header[slot, self._side(number), 0] == number)

    def _side(self, number: int) -> int:
        return number // self._workers % 2
