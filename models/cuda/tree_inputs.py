"""What a tree of branches is made of, and how it gets to the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ipc.messages.sampling import GREEDY_BELOW
from models.cuda.staging import Field, Staging


@dataclass(slots=True)
class TreeInputs:
    """B branches of R rows, the branches of a row together and rows in order.

    Attributes:
        tokens: int64 [B], first token of each branch (the outcome's t*).
        positions: int64 [B], its position.
        context_lens: int [B], trunk positions the branch sees.
        seqs: int [B], rising: row of each branch.
        tables: one block table a row.
        scratch: int64 [B], flat KV slot of the branch's first token; the next K - 1 follow it.
        keys: int64 [K, B], noise key of each step's choice; a device tensor or an array.
        temperature: float [B], 0 = greedy.
        home: where the GPU publishes them, None if it does not.
    """

    tokens: np.ndarray
    positions: np.ndarray
    context_lens: np.ndarray
    seqs: np.ndarray
    tables: Sequence[Sequence[int] | np.ndarray]
    scratch: np.ndarray
    keys: np.ndarray | torch.Tensor
    temperature: np.ndarray
    home: TreeHome | None = None


@dataclass(slots=True)
class TreeHome:
    """Whose branches a tree's are, for the GPU to choose or publish them.

    Attributes:
        number: the leased round whose outcomes they are for; 0: the host publishes them.
        homes: int64 [R], slot of each row in the cache.
        hashes: uint64 [R], prefix hash of each row.
        outcomes: int64 [B], k << 32 | t*; empty where the GPU chooses them.
    """

    number: int
    homes: np.ndarray
    hashes: np.ndarray
    outcomes: np.ndarray


class TreeStaging:
    """Inputs of a graph of R rows of W branches, K steps, block tables of ``num_blocks`` entries.

    Attributes:
        tensors: the device's, at fixed addresses.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        steps: int,
        num_blocks: int,
        device: torch.device,
    ) -> None:
        self._rows, self._width, self._num_blocks = rows, width, num_blocks
        branches = rows * width
        fields = [
            Field("tokens", (branches,), torch.int64),
            Field("positions", (branches,), torch.int64),
            Field("slots", (branches,), torch.int64),
            Field("keys", (steps, branches), torch.int64),
            Field("live", (branches,), torch.int32),
            Field("context_lens", (branches,), torch.int32),
            Field("factors", (branches,), torch.float32),
            Field("tables", (rows, num_blocks), torch.int32),
            Field("numbers", (rows,), torch.int64),
            Field("homes", (rows,), torch.int64),
            Field("hashes", (rows,), torch.int64),
            Field("outcomes", (rows, width), torch.int64),
        ]
        self._staging = Staging(fields, device)
        self.tensors = self._staging.tensors

    def load(self, tree: TreeInputs) -> np.ndarray:
        """Queue the copy of all of a tree. Returns int64 [B], the column of each branch.

        Raises ValueError if the branches do not fit.
        """
        where = self._columns(tree)
        self._staging.wait()
        host = self._staging.host
        host["live"].fill(0)
        host["context_lens"].fill(0)
        host["live"][where] = 1
        host["tokens"][where] = tree.tokens
        host["positions"][where] = tree.positions
        host["context_lens"][where] = tree.context_lens
        host["slots"][where] = tree.scratch
        temperature = np.asarray(tree.temperature, np.float64)
        sampled = temperature >= GREEDY_BELOW
        host["factors"].fill(0)
        host["factors"][where] = np.where(sampled, 1.0 / np.where(sampled, temperature, 1.0), 0.0)
        for row, table in enumerate(tree.tables):
            if len(table) > self._num_blocks:
                raise ValueError(f"row {row}: {len(table)} blocks in a graph of {self._num_blocks}")
            host["tables"][row, : len(table)] = table
        self._load_home(tree.home, where)
        if isinstance(tree.keys, np.ndarray):
            host["keys"][:, where] = tree.keys.view(np.int64)
        self._staging.copy()
        if isinstance(tree.keys, torch.Tensor):
            keys = self.tensors["keys"]
            column = torch.from_numpy(where).to(keys.device, non_blocking=True)
            keys.index_copy_(1, column, tree.keys)
        return where

    def prepare(
        self, home: TreeHome, tables: Sequence[Sequence[int]], temperatures: Sequence[float]
    ) -> None:
        """Queue the copy of what is known of a tree whose branches the GPU will choose.

        ``home.outcomes`` is not looked at. Raises ValueError if the rows do not fit.
        """
        self._staging.wait()
        host = self._staging.host
        host["live"].fill(0)
        host["context_lens"].fill(0)
        factors = host["factors"].reshape(self._rows, self._width)
        for row, (table, temperature) in enumerate(zip(tables, temperatures, strict=True)):
            if row >= self._rows or len(table) > self._num_blocks:
                raise ValueError(
                    f"row {row} of {len(table)} blocks in a graph of {self._rows} rows of "
                    f"{self._num_blocks}"
                )
            host["tables"][row, : len(table)] = table
            factors[row] = 0.0 if temperature < GREEDY_BELOW else 1.0 / temperature
        self._load_home(home, np.empty(0, np.int64))
        self._staging.copy()

    def _columns(self, tree: TreeInputs) -> np.ndarray:
        seqs = np.asarray(tree.seqs, np.int64)
        counts = np.bincount(seqs, minlength=len(tree.tables))
        if len(tree.tables) > self._rows or counts.max(initial=0) > self._width:
            raise ValueError(
                f"{len(tree.tables)} rows of up to {counts.max(initial=0)} branches in a graph of "
                f"{self._rows} rows of {self._width}"
            )
        first = np.concatenate(([0], np.cumsum(counts)[:-1]))
        where: np.ndarray = seqs * self._width + np.arange(len(seqs)) - first[seqs]
        return where

    def _load_home(self, home: TreeHome | None, where: np.ndarray) -> None:
        host = self._staging.host
        host["numbers"].fill(0)
        if home is None:
            return
        rows = len(home.homes)
        host["numbers"][:rows] = home.number
        host["homes"][:rows] = home.homes
        host["hashes"].view(np.uint64)[:rows] = home.hashes
        host["outcomes"].fill(-1)
        host["outcomes"].reshape(-1)[where] = home.outcomes[: len(where)]
