"""What runners of graphs share: one graph for each bucket of rows and positions."""

from __future__ import annotations

from collections.abc import Iterator

from ipc.errors import ConfigError
from models.cuda.capture import (
    GraphOptions,
    GraphPool,
    bucket_of,
    context_bucket,
    context_buckets,
    row_buckets,
)
from models.kv_cache import KVCache
from models.transformer import Transformer


class Bucketed:
    """The buckets of one model's graphs, and the memory that the graphs share.

    Args:
        max_rows: most rows of a launch.
        max_positions: most positions of a sequence.
        pool: shared with other runners; None = one of its own, with ``options``.

    Raises ConfigError if the model's backend is not the CUDA one.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        max_rows: int,
        max_positions: int,
        options: GraphOptions | None,
        pool: GraphPool | None,
    ) -> None:
        if model.backend.name != "cuda":
            raise ConfigError("backend", f"graphs need the cuda backend, not {model.backend.name}")
        self._model, self._kv = model, kv
        self._max_rows = max_rows
        self._max_blocks = -(-max_positions // kv.block_size)
        self.pool = pool or GraphPool(options)

    def _bucket(self, rows: int, blocks: int) -> tuple[int, int]:
        """Rows and blocks a row of the smallest bucket that holds so many."""
        context = context_bucket(blocks, self._kv.block_size, self._max_blocks)
        return bucket_of(rows, self._max_rows), context

    def _buckets(self) -> Iterator[tuple[int, int]]:
        """All of them, rising."""
        for rows in row_buckets(self._max_rows):
            for blocks in context_buckets(self._kv.block_size, self._max_blocks):
                yield rows, blocks
