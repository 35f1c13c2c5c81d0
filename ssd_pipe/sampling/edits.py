"""Changes to single logits of a batch, gathered row by row and made all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ipc.messages.sampling import Processors

NEG_INF = float("-inf")


class Edits:
    """Changes to single logits of a batch [N, V], gathered row by row and made all at once."""

    def __init__(self) -> None:
        self._biases: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._bans: list[tuple[int, np.ndarray]] = []
        self._penalties: list[tuple[int, np.ndarray, np.ndarray, Processors]] = []
        self._allowances: list[tuple[int, np.ndarray]] = []
        self._masks: list[tuple[int, bytes]] = []

    def bias(self, row: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Add ``values`` to the logits of distinct ``ids``."""
        self._biases.append((row, ids, values))

    def ban(self, row: int, ids: np.ndarray) -> None:
        """Make ``ids`` impossible."""
        self._bans.append((row, ids))

    def allow(self, row: int, ids: np.ndarray) -> None:
        """Make everything but ``ids`` impossible."""
        self._allowances.append((row, ids))

    def penalise(self, row: int, ids: np.ndarray, counts: np.ndarray, settings: Processors) -> None:
        """Penalise distinct ``ids``, which occur ``counts`` times in the output."""
        self._penalties.append((row, ids, counts, settings))

    def mask(self, row: int, allowed: bytes) -> None:
        """Make everything impossible whose bit in ``allowed`` is not set."""
        self._masks.append((row, allowed))

    def apply(self, logits: torch.Tensor) -> None:
        """Make the changes in float32 [N, V]. Ids beyond V are ignored."""
        if self._biases:
            places = _Places.of([(r, ids) for r, ids, _ in self._biases], logits)
            values = np.concatenate([v for *_, v in self._biases])
            places.put(places.take() + places.tensor(values))
        if self._bans:
            _Places.of(self._bans, logits).put(NEG_INF)
        if self._penalties:
            self._penalise(logits)
        for row, ids in self._allowances:
            # Of a cut vocabulary nothing may be left; the target will have the say.
            if len(inside := ids[ids < logits.shape[1]]):
                index = torch.from_numpy(inside).to(logits.device)
                kept = logits[row, index]
                logits[row] = NEG_INF
                logits[row, index] = kept
        if self._masks:
            self._mask(logits)

    def _penalise(self, logits: torch.Tensor) -> None:
        places = _Places.of([(r, ids) for r, ids, *_ in self._penalties], logits)
        sizes = [len(ids) for _, ids, *_ in self._penalties]
        rules = [rules for *_, rules in self._penalties]

        def spread(values: list[float]) -> torch.Tensor:
            return places.tensor(np.repeat(np.array(values, np.float32), sizes))

        counts = places.tensor(np.concatenate([c for _, _, c, _ in self._penalties]))
        repetition = spread([r.repetition_penalty for r in rules])
        x = places.take()
        x = torch.where(x > 0, x / repetition, x * repetition)
        x = x - spread([r.frequency_penalty for r in rules]) * counts
        x = x - spread([r.presence_penalty for r in rules]) * (counts > 0)
        places.put(x)

    def _mask(self, logits: torch.Tensor) -> None:
        device, vocab = logits.device, logits.shape[1]
        width = -(-vocab // 8)
        packed = np.stack([np.frombuffer(mask, np.uint8, width) for _, mask in self._masks])
        packed[:, -1] &= (1 << (vocab - 8 * (width - 1))) - 1
        # Of a cut vocabulary nothing may be left; the target will have the say.
        some = packed.any(axis=1)
        rows = np.array([row for row, _ in self._masks])[some]
        packed = ~packed[some]
        if device.type == "cpu":
            bits = np.unpackbits(packed, axis=1, count=vocab, bitorder="little").view(np.bool_)
            for row, banned in zip(rows.tolist(), torch.from_numpy(bits), strict=True):
                logits[row].masked_fill_(banned, NEG_INF)
            return
        index = torch.from_numpy(rows).to(device)
        banned = unpack_bits(torch.from_numpy(packed).to(device), vocab)
        logits[index] = logits[index].masked_fill(banned, NEG_INF)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` bits of each row, lowest first: uint8 [M, W] -> bool [M, count]."""
    powers = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=packed.device)
    return packed[:, :, None].bitwise_and(powers).ne(0).flatten(1)[:, :count]


class _Places(NamedTuple):
    """Single logits of a batch; ``kept`` are the given ones whose id is below V."""

    logits: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor
    kept: np.ndarray | None

    @classmethod
    def of(cls, where: Sequence[tuple[int, np.ndarray]], logits: torch.Tensor) -> _Places:
        rows = np.repeat([row for row, _ in where], [len(ids) for _, ids in where])
        ids = np.concatenate([ids for _, ids in where])
        kept = None
        inside = ids < logits.shape[1]
        if not inside.all():
            kept, rows, ids = inside, rows[inside], ids[inside]
        device = logits.device
        return cls(
            logits, torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device), kept
        )

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        """``values``, one per given place, of the kept places."""
        return torch.from_numpy(values if self.kept is None else values[self.kept]).to(
            self.logits.device
        )

    def take(self) -> torch.Tensor:
        return self.logits[self.rows, self.ids]

    def put(self, values: torch.Tensor | float) -> None:
        self.logits[self.rows, self.ids] = torch.as_tensor(values, device=self.logits.device)
