"""Drafting token by token on CUDA graphs: the draft of SD, and backups made just in time.

While one token is awaited the pass for the next one is on the GPU's queue already: a graph leaves
its choices as another launch's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from models.cuda.capture import GraphPool
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepGraph, StepRow
from models.kv_cache import KVCache
from models.transformer import Transformer
from ssd_pipe.drafting.gpu_waits import wait_until
from ssd_pipe.drafting.graph_inputs import step_rows
from ssd_pipe.drafting.trunk import Feed, Trunk


@dataclass(slots=True)
class _Queued:
    """A pass that was launched before its tokens were known: launch ``number`` of ``graph``.

    ``rows``: what it feeds, one token each, once that is known.
    """

    graph: StepGraph
    number: int
    rows: list[tuple[Trunk, int, list[int]]]


class GraphedChains:
    """The passes of one draft that choose one token a row.

    Args:
        width: most tokens a row is fed.
        max_rows: most rows of a pass.
        max_positions: most positions of a sequence.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        width: int,
        max_rows: int,
        max_positions: int,
        pool: GraphPool,
    ) -> None:
        self._width = width
        self._runner = GraphRunner(
            model, kv, max_rows, max_positions, post=True, narrow=True, pool=pool
        )
        self._queued: _Queued | None = None

    def warm_up(self) -> None:
        """Make the graphs that rounds can need."""
        self._runner.warm_up((1, self._width))

    def logits(self, feeds: Sequence[Feed]) -> torch.Tensor | None:
        """Feed rows; float32 [L, V] of the tokens from each row's fourth entry on, in order. None
        if a row is too long for a graph."""
        graph = self._graph(feeds)
        if graph is None:
            return None
        out = graph.run(step_rows(feeds))
        parts = [
            out.logits[i, first : len(tokens)] for i, (_, _, tokens, first) in enumerate(feeds)
        ]
        return torch.cat(parts).float()

    def next_tokens(self, feeds: Sequence[Feed], again: bool = False) -> list[int] | None:
        """Feed rows and choose the token after each; None if they are too long for a graph.

        ``again``: the same rows will be fed what they get now, next of all, and have the blocks.
        Raises ResourceError if the GPU does not answer.
        """
        queued, self._queued = self._queued, None
        if queued is not None and queued.rows == [(t, at, fed) for t, at, fed, _ in feeds]:
            graph, number = queued.graph, queued.number
        else:
            found = self._graph(feeds)
            if found is None:
                return None
            graph, rows = found, step_rows(feeds)
            if again and graph.successor not in (None, graph):
                graph.successor.load([_one_token(row) for row in rows])
            graph.run(rows)
            number = graph.launches
        following = graph.go_on([len(t.table.blocks) for t, *_ in feeds]) if again else None
        chosen = self._wait(graph, number)
        tokens = [chosen[i][len(fed) - 1] for i, (_, _, fed, _) in enumerate(feeds)]
        if following is not None:
            known = [
                (trunk, at + len(fed), [token])
                for (trunk, at, fed, _), token in zip(feeds, tokens, strict=True)
            ]
            self._queued = _Queued(following, following.launches, known)
        return tokens

    def _graph(self, feeds: Sequence[Feed]) -> StepGraph | None:
        longest = max(len(tokens) for _, _, tokens, _ in feeds)
        if longest > self._width:
            return None
        width = 1 if longest == 1 else self._width
        return self._runner.graph(len(feeds), width, max(len(t.table.blocks) for t, *_ in feeds))

    @staticmethod
    def _wait(graph: StepGraph, number: int) -> list[list[int]]:
        if graph.posting is None:
            raise RuntimeError("the graph posts nothing")
        wait_until(partial(graph.posting.arrived, number))
        found: list[list[int]] = graph.posting.choices(number).tolist()
        return found


def _one_token(row: StepRow) -> StepRow:
    """A row of one token, which, with its position, will be another's to say."""
    return StepRow(row.blocks, row.start, [0], row.seed, row.temperature)
