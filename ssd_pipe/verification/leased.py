"""Leased rounds on the target's GPU: the verification graphs feed themselves.

The same graphs serve both paths. Outside a lease every row's state is OFF and the two kernels that
``models.cuda.rounds`` adds do nothing, so a leased round adds in the same order as any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ipc.messages.target import Lease
from ipc.round_records import ROUNDS
from models.cuda.graphs import StepGraph
from models.cuda.rounds import layout
from models.cuda.rounds.gate import gate
from models.cuda.rounds.settle import settle
from models.cuda.rounds.tables import RoundTables
from models.cuda.staging import Field, Staging


class LeasedRounds:
    """``StepHooks`` and the state of the rows under a lease.

    Args:
        tables: cache, records and mail.
        synthetic: outcomes are replayed from the lease's draws.
    """

    def __init__(self, tables: RoundTables, device: torch.device, synthetic: bool) -> None:
        self._tables, self._synthetic = tables, synthetic
        fields = [
            Field("rows", (tables.max_rows, layout.STATE_WORDS), torch.int64),
            Field("lease", (layout.LEASE_WORDS,), torch.int64),
            Field("draws", (ROUNDS, tables.max_rows), torch.int64),
        ]
        self._staging = Staging(fields, device)

    def head(self, graph: StepGraph) -> None:
        state = self._staging.tensors
        tokens, counts = graph.inputs["tokens"], graph.inputs["counts"]
        if graph.width == self._tables.k + 1:
            gate(self._tables, tokens, counts, state["rows"], state["lease"])

    def tail(self, graph: StepGraph) -> None:
        state = self._staging.tensors
        if graph.width == self._tables.k + 1:
            settle(
                self._tables,
                graph.output.chosen,
                graph.inputs,
                state["rows"],
                state["lease"],
                state["draws"],
                self._synthetic,
            )

    def load(self, lease: Lease, slots: Sequence[int]) -> None:
        """Queue the state of a lease's rows, which hold these slots."""
        self._staging.wait()
        host = self._staging.host
        host["rows"].fill(0)
        host["lease"][layout.WAITS] = lease.waits
        host["lease"][layout.PATIENCE] = lease.patience_us * 1000
        host["lease"][layout.BACKUP_PATIENCE] = lease.backup_patience_us * 1000
        host["lease"][layout.FIRST] = lease.first
        for i, (row, slot) in enumerate(zip(lease.rows, slots, strict=True)):
            state = host["rows"][i]
            state[layout.MODE] = layout.RUN
            state[layout.AT] = lease.first
            state.view(np.uint64)[layout.HASH] = row.prefix_hash
            state[layout.LEFT] = row.left
            state[layout.SLOT] = slot
            state[layout.STATE_HEAD :] = -1
            state[layout.STATE_HEAD : layout.STATE_HEAD + len(row.stop_ids)] = row.stop_ids
            host["draws"][: len(row.draws), i] = row.draws
        self._staging.copy()

    def clear(self) -> None:
        """Queue the end of a lease: no row is on any more."""
        self._staging.wait()
        self._staging.host["rows"].fill(0)
        self._staging.copy()
