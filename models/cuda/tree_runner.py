"""Tree graphs by bucket of rows and positions."""

from __future__ import annotations

import torch

from models.cuda.bucketed import Bucketed
from models.cuda.capture import GraphOptions, GraphPool
from models.cuda.tree import TreeGraph, TreeHooks
from models.cuda.tree_inputs import TreeInputs
from models.kv_cache import KVCache
from models.transformer import Transformer


class TreeRunner(Bucketed):
    """Tree graphs of one draft, by bucket; made at first use.

    Args:
        steps: K. max_rows: most rows. width: most branches of a row.
        max_positions: most positions of a sequence.
        hooks, stepwise: see TreeGraph.
        vocab: propose among the first so many tokens only, 0 = all.

    Raises ConfigError if the model's backend is not the CUDA one.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        steps: int,
        max_rows: int,
        width: int,
        max_positions: int,
        *,
        hooks: TreeHooks | None = None,
        vocab: int = 0,
        stepwise: bool = False,
        options: GraphOptions | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        super().__init__(model, kv, max_rows, max_positions, options, pool)
        self._steps, self._width = steps, width
        self._hooks, self._vocab, self._stepwise = hooks, vocab, stepwise
        self._logits = torch.empty(
            (max_rows * width, vocab or model.config.vocab_size),
            dtype=model.backend.activation_dtype,
            device=model.backend.device,
        )
        self._graphs: dict[tuple[int, int], TreeGraph] = {}

    def graph(self, rows: int, blocks: int = 1) -> TreeGraph:
        """The graph for ``rows`` rows of up to ``blocks`` blocks each."""
        bucket, context = self._bucket(rows, blocks)
        key = (bucket, context)
        if key not in self._graphs:
            self._graphs[key] = TreeGraph(
                self._model,
                self._kv,
                self.pool,
                bucket,
                self._width,
                self._steps,
                context,
                self._logits,
                self._hooks,
                self._vocab,
                self._stepwise,
            )
        return self._graphs[key]

    def graph_of(self, tree: TreeInputs) -> TreeGraph:
        """The graph that holds ``tree``."""
        return self.graph(len(tree.tables), max(len(table) for table in tree.tables))

    def warm_up(self) -> None:
        """Make the graphs of all buckets of rows and positions."""
        for rows, blocks in self._buckets():
            self.graph(rows, blocks)

    def run(self, tree: TreeInputs) -> torch.Tensor:
        """Grow ``tree``; queued on the current stream. Returns int64 [K, B] on the device.

        Raises ValueError if the branches do not fit.
        """
        graph = self.graph_of(tree)
        where = torch.from_numpy(graph.run(tree))
        device = graph.chosen.device
        if device.type == "cuda":
            where = where.pin_memory()
        return graph.chosen.view(self._steps, -1)[:, where.to(device, non_blocking=True)]
