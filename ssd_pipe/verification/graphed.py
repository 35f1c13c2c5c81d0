"""Decoding and verification on CUDA graphs: forward pass, head and choice of tokens in one launch.

Every row is padded to one of a few widths, so that few graphs serve all steps, and so that steps of
the same width add in the same order whoever asks for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Lease
from ipc.messages.target import StepRow as PlanRow
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepGraph, StepRow
from models.kv_cache import KVCache
from models.transformer import Transformer
from ssd_pipe.errors import ResourceError
from ssd_pipe.verification.leased import LeasedRounds

Row = tuple[Sequence[int], NoiseKey, PlanRow]
"""(block table, noise key, the plan's row)"""

STUCK = 60.0  # seconds a step may take
LOOK_EVERY = 1000
"""Looks at what a step posted between two looks at the GPU, which may have failed."""


class GraphedSteps:
    """The steps of one target on one GPU.

    Args:
        max_rows: most rows of a step.
        max_positions: most positions of a sequence.
        widths: tokens a row may be padded to, rising.
        leased: lets rounds run without the host, None = not here.
        ahead: steps may be launched before their input is known (see ``launch_ahead``).
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        max_rows: int,
        max_positions: int,
        widths: Sequence[int],
        leased: LeasedRounds | None = None,
        ahead: bool = False,
    ) -> None:
        self._ahead = ahead and widths[-1] > 1
        self._runner = GraphRunner(
            model,
            kv,
            max_rows,
            max_positions,
            hooks=leased,
            post=True,
            mail=self._ahead,
        )
        self._device, self._block_size = model.backend.device, kv.block_size
        self._leased = leased
        self._widths = list(widths)
        self._rows: list[Row] = []
        self._graph: StepGraph | None = None
        self._number = 0  # of the launch that is the present step
        self._queued: tuple[StepGraph, int] | None = None  # the step after it, if it is queued
        self._gated: StepGraph | None = None  # the last launch of which waits for its input

    def warm_up(self) -> None:
        """Make the graphs that steps can need."""
        self._runner.warm_up(self._widths)

    def close(self) -> None:
        """Destroy the graphs. No step may follow."""
        self.settle([])
        self._graph = self._queued = None
        self._runner.close()

    def takes(self, row: PlanRow) -> bool:
        """Whether a row is a step of decoding, not a long piece of a prompt."""
        return row.sample and len(row.tokens) <= self._widths[-1]

    def run(self, rows: Sequence[Row]) -> None:
        """Queue a step of rows that ``takes`` likes; one that was queued ahead is void."""
        steps = _step_rows(rows)
        graph = self._runner.graph_of(steps, self._width(steps))
        graph.run(steps)
        self._begin(rows, graph)

    def _width(self, steps: Sequence[StepRow]) -> int:
        longest = max(len(step.tokens) for step in steps)
        return next(w for w in self._widths if w >= longest)

    def _begin(self, rows: Sequence[Row], graph: StepGraph) -> None:
        self._rows, self._graph, self._number = list(rows), graph, graph.launches
        self._queued = None

    def go_on(self, more: Sequence[Sequence[int]]) -> bool:
        """Queue the step after the present one, of the one token that each row is about to get.

        ``more``: blocks by row, beyond those it has. False, and nothing is queued, if that cannot
        be. ``run`` makes it void, ``take_over`` the present one. A void step's choices may be
        overwritten unread, and only those: whatever comes next is launched after ``choices``.
        """
        graph = self._graph
        if graph is None or self._queued is not None or self._gated is not None:
            return False
        held = [len(blocks) for blocks, _, _ in self._rows]
        for (_, _, row), count, blocks in zip(self._rows, held, more, strict=True):
            if row.start + len(row.tokens) + 1 > (count + len(blocks)) * self._block_size:
                return False
        following = graph.go_on(held, more)
        if following is not None:
            self._queued = following, following.launches
        return following is not None

    def take_over(self, rows: Sequence[Row]) -> None:
        """The step that ``go_on`` queued is the present one, of these rows. Raises RuntimeError if
        there is none."""
        if self._queued is None:
            raise RuntimeError("no step was queued ahead")
        (self._graph, self._number), self._queued = self._queued, None
        self._rows = list(rows)

    @property
    def gated(self) -> bool:
        """Whether a step waits on the GPU for its input. Nothing may be asked of the GPU then but
        ``choices`` and ``settle``: it would not be done."""
        return self._gated is not None

    def launch_ahead(self, more: Sequence[Sequence[int]]) -> bool:
        """Queue the step after the present one, of as many tokens as a row can have, before its
        rows are known; ``settle`` must follow. False, and nothing is queued, if that cannot be.

        ``more``: blocks by row, beyond those it has.
        """
        if not self._ahead or self._graph is None or self._queued is not None or self.gated:
            return False
        held = [len(blocks) for blocks, _, _ in self._rows]
        longest = max(n + len(m) for n, m in zip(held, more, strict=True))
        graph = self._runner.graph(len(held), self._widths[-1], longest)
        self._gated = graph  # whatever goes wrong, its mail is sent
        graph.launch_ahead()
        return True

    def settle(self, rows: Sequence[Row]) -> bool:
        """Give a step that waits for its input ``rows``, if ``run`` would choose its graph for
        them, and make it the present one; void it otherwise, as without rows. Returns whether it
        got them. Nothing waits afterwards."""
        graph = self._gated
        if graph is None:
            return False
        steps = _step_rows(rows)
        taken = bool(steps) and self._runner.serves(graph, steps, self._width(steps))
        graph.mail(steps if taken else [])
        self._gated = None
        if taken:
            self._begin(rows, graph)
        return taken

    def begin_lease(self, rows: Sequence[Row], lease: Lease) -> StepGraph:
        """The graph whose launches are the rounds of a lease, its first input on the way.

        ``rows`` have the blocks of the whole lease. Raises RuntimeError if there are none here.
        """
        if self._leased is None:
            raise RuntimeError("a lease for a target that cannot take one")
        steps = _step_rows(rows)
        graph = self._runner.graph_of(steps, self._widths[-1])
        graph.load(steps)
        self._leased.load(lease, [row.slot for _, _, row in rows])
        return graph

    def end_lease(self) -> None:
        """Steps are the host's again."""
        if self._leased is not None:
            self._leased.clear()

    def choices(self, meanwhile: Callable[[], None] | None = None) -> list[list[int]]:
        """The target's own tokens after each row's chain, K + 1 a row; waits for the step.

        They take temperature and noise into account, but no filters and no processors.
        ``meanwhile`` is called again and again until the step has ended. Raises ResourceError if it
        ends without a result, or does not end.
        """
        graph = self._graph
        if graph is None or graph.posting is None:
            raise RuntimeError("no step has run")
        looks, deadline = 0, time.monotonic() + STUCK
        while True:
            if meanwhile is not None:
                meanwhile()
            if graph.posting.arrived(self._number):
                break
            looks += 1
            if looks % LOOK_EVERY == 0:
                self._check(graph, deadline)
        table = graph.posting.choices(self._number).tolist()
        return [
            table[i][len(row.tokens) - 1 - row.chain : len(row.tokens)]
            for i, (_, _, row) in enumerate(self._rows)
        ]

    def _check(self, graph: StepGraph, deadline: float) -> None:
        """Raises what the GPU has failed with."""
        if time.monotonic() > deadline:
            raise ResourceError(f"a step on the GPU has not ended within {STUCK:.0f} s")
        idle = self._device.type != "cuda" or torch.cuda.current_stream(self._device).query()
        if idle and (graph.posting is None or not graph.posting.arrived(self._number)):
            raise ResourceError("a step on the GPU ended without a result")

    def logits(self, wanted: Sequence[int]) -> torch.Tensor:
        """float32 [sum(chain + 1), V] of the given rows, in their order; no step may have been
        queued since."""
        if self._graph is None:
            raise RuntimeError("no step has run")
        if self.gated:
            raise RuntimeError("logits behind a step that waits for its input")
        logits = self._graph.output.logits
        parts = []
        for i in wanted:
            row = self._rows[i][2]
            parts.append(logits[i, len(row.tokens) - 1 - row.chain : len(row.tokens)])
        return torch.cat(parts).float()


def _step_rows(rows: Sequence[Row]) -> list[StepRow]:
    return [
        StepRow(blocks, row.start, row.tokens, key.seed, key.temperature)
        for blocks, key, row in rows
    ]
