"""Where the round kernels find what they share with the other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton

from models.cuda.rounds.layout import table_words


class Words(Protocol):
    """int64 memory a kernel can use: a tensor, or ``ipc_memory.DeviceMemory``."""

    @property
    def dtype(self) -> torch.dtype: ...

    def data_ptr(self) -> int: ...


@dataclass(slots=True)
class RoundTables:
    """Cache, records and mail, and the shapes of these.

    Attributes:
        table: the cache, int64 [slots, table_words].
        entries, k: its branches a slot and tokens a branch.
        vocab_size: a chain with another token is not taken.
        control, mail, records: see ``ipc.round_records``; None where only the cache is used.
        max_rows: second dimension of ``records``.
    """

    table: Words
    entries: int
    k: int
    vocab_size: int
    control: torch.Tensor | None = None
    mail: torch.Tensor | None = None
    records: torch.Tensor | None = None
    max_rows: int = 0

    @property
    def cache_shape(self) -> dict[str, int]:
        """Launch arguments that tell a kernel the shape of a slot's part of the cache."""
        return {
            "ENTRIES": self.entries,
            "ENTRIES_P": triton.next_power_of_2(self.entries),
            "TABLE": table_words(self.entries, self.k),
        }
