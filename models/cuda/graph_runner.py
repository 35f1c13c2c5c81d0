"""Steps of one model on graphs, by bucket of rows, width and positions."""

from __future__ import annotations

from collections.abc import Sequence

from models.cuda.bucketed import Bucketed
from models.cuda.capture import GraphOptions, GraphPool
from models.cuda.graphs import StepGraph, StepHooks, StepOutput, StepRow
from models.kv_cache import KVCache
from models.transformer import Transformer


class GraphRunner(Bucketed):
    """Steps of one model, each on the smallest graph that holds it; graphs are made at first use.

    Args:
        max_rows: most rows of a step.
        max_positions: most positions of a sequence.
        top_n: candidates a row, 0 = none (the draft's glue pass wants them).
        hooks: what every graph does besides.
        post: whether graphs post their choices.
        narrow: the successor of a graph is the one of width 1.
        mail: whether graphs can be launched ahead of their input.

    Raises ConfigError if the model's backend is not the CUDA one.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        max_rows: int,
        max_positions: int,
        *,
        top_n: int = 0,
        hooks: StepHooks | None = None,
        post: bool = False,
        narrow: bool = False,
        mail: bool = False,
        options: GraphOptions | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        super().__init__(model, kv, max_rows, max_positions, options, pool)
        self._top_n, self._hooks = top_n, hooks
        self._post, self._narrow, self._mail = post, narrow, mail
        self._graphs: dict[tuple[int, int, int], StepGraph] = {}

    def run(self, rows: Sequence[StepRow], width: int = 0) -> StepOutput:
        """One step, queued on the current stream. ``width`` 0 = the longest row's tokens.

        Raises ValueError for more rows or positions than the runner was made for.
        """
        return self.graph_of(rows, width or max(len(row.tokens) for row in rows)).run(rows)

    def graph_of(self, rows: Sequence[StepRow], width: int) -> StepGraph:
        """The graph of ``width`` that holds ``rows``. Raises ValueError for more rows than the
        runner was made for."""
        if len(rows) > self._max_rows:
            raise ValueError(f"{len(rows)} rows, made for {self._max_rows}")
        return self.graph(len(rows), width, max(len(row.blocks) for row in rows))

    def graph(self, rows: int, width: int, blocks: int) -> StepGraph:
        """The graph for ``rows`` rows of ``width`` tokens, of up to ``blocks`` blocks each."""
        key = self._key(rows, width, blocks)
        if key not in self._graphs:
            successor = self.graph(rows, 1, blocks) if self._narrow and width > 1 else None
            self._graphs[key] = StepGraph(
                self._model,
                self._kv,
                self.pool,
                *key,
                self._top_n,
                self._hooks,
                self._post,
                successor,
                self._mail,
            )
        return self._graphs[key]

    def serves(self, graph: StepGraph, rows: Sequence[StepRow], width: int) -> bool:
        """Whether ``graph_of`` gives this graph for ``rows``; makes none."""
        longest = max(len(row.blocks) for row in rows)
        return self._graphs.get(self._key(len(rows), width, longest)) is graph

    def _key(self, rows: int, width: int, blocks: int) -> tuple[int, int, int]:
        bucket, context = self._bucket(rows, blocks)
        return bucket, width, context

    def close(self) -> None:
        """Destroy the graphs, and what their collectives hold."""
        self._graphs.clear()

    def warm_up(self, widths: Sequence[int]) -> None:
        """Make the graphs of all buckets of rows and positions at these widths."""
        for width in widths:
            for rows, blocks in self._buckets():
                self.graph(rows, width, blocks)
