"""Decoding and verification on CUDA graphs: forward pass, head and choice of tokens in one launch.

Every row is padded to one of a few widths, so that few graphs serve all steps, and so that steps of
the same width add in the same order whoever asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Lease
from ipc.messages.target import StepRow as PlanRow
from models.cuda.capture import GraphOptions
from models.cuda.graphs import GraphRunner, StepGraph, StepOutput, StepRow
from models.cuda.staging import Readback
from models.kv_cache import KVCache
from models.transformer import Transformer
from ssd_pipe.verification.leased import LeasedRounds

Row = tuple[Sequence[int], NoiseKey, PlanRow]
"""(block table, noise key, the plan's row)"""


class GraphedSteps:
    """The steps of one target on one GPU.

    Args:
        max_rows: most rows of a step.
        max_positions: most positions of a sequence.
        widths: tokens a row may be padded to, rising.
        leased: lets rounds run without the host, None = not here.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        max_rows: int,
        max_positions: int,
        widths: Sequence[int],
        options: GraphOptions | None = None,
        leased: LeasedRounds | None = None,
    ) -> None:
        self._runner = GraphRunner(
            model, kv, max_rows, max_positions, hooks=leased, options=options
        )
        self._leased = leased
        self._widths = list(widths)
        self._rows: list[Row] = []
        self._output: StepOutput | None = None
        self._readback = Readback(model.backend.device)
        self._chosen = np.empty((0, 0), np.int64)

    def warm_up(self) -> None:
        """Make the graphs that steps can need."""
        self._runner.warm_up(self._widths)

    def close(self) -> None:
        """Destroy the graphs. No step may follow."""
        self._runner.close()

    def takes(self, row: PlanRow) -> bool:
        """Whether a row is a step of decoding, not a long piece of a prompt."""
        return row.sample and len(row.tokens) <= self._widths[-1]

    def run(self, rows: Sequence[Row]) -> None:
        """Queue a step of rows that ``takes`` likes."""
        steps = _step_rows(rows)
        longest = max(len(step.tokens) for step in steps)
        width = next(w for w in self._widths if w >= longest)
        self._rows = list(rows)
        self._output = self._runner.run(steps, width)
        self._chosen = self._readback.fetch("chosen", self._output.chosen)

    def begin_lease(self, rows: Sequence[Row], lease: Lease) -> StepGraph:
        """The graph whose launches are the rounds of a lease, its first input on the way.

        ``rows`` have the blocks of the whole lease. Raises RuntimeError if there are none here.
        """
        if self._leased is None:
            raise RuntimeError("a lease for a target that cannot take one")
        blocks = max(len(table) for table, _, _ in rows)
        graph = self._runner.graph(len(rows), self._widths[-1], blocks)
        graph.load(_step_rows(rows))
        self._leased.load(lease, [row.slot for _, _, row in rows])
        return graph

    def end_lease(self) -> None:
        """Steps are the host's again."""
        if self._leased is not None:
            self._leased.clear()

    def choices(self) -> list[list[int]]:
        """The target's own tokens after each row's chain, K + 1 a row; waits for the step.

        They take temperature and noise into account, but no filters and no processors.
        """
        self._readback.wait()
        table = self._chosen.tolist()
        return [
            table[i][len(row.tokens) - 1 - row.chain : len(row.tokens)]
            for i, (_, _, row) in enumerate(self._rows)
        ]

    def logits(self, wanted: Sequence[int]) -> torch.Tensor:
        """float32 [sum(chain + 1), V] of the given rows, in their order."""
        out = self._output
        if out is None:
            raise RuntimeError("no step has run")
        parts = []
        for i in wanted:
            row = self._rows[i][2]
            parts.append(out.logits[i, len(row.tokens) - 1 - row.chain : len(row.tokens)])
        return torch.cat(parts).float()


def _step_rows(rows: Sequence[Row]) -> list[StepRow]:
    return [
        StepRow(blocks, row.start, row.tokens, key.seed, key.temperature)
        for blocks, key, row in rows
    ]
