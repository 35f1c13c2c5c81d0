"""The draft's tree decode: K steps of all branches, sampling included, as one graph launch.

Step j's choices are the tokens of step j + 1 and never leave the device. A branch sees the first
``context_lens`` positions of its row's trunk, then its own tokens in its scratch slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from models.cuda.capture import GraphOptions, GraphPool, bucket_of
from models.cuda.graphs import head_logits
from models.cuda.inputs import expand_tree
from models.cuda.noise import choose
from models.cuda.staging import Field, Staging
from models.cuda.tiles import StaticBatch, fixed_tiles, tile_width
from models.kv_cache import KVCache
from models.transformer import Transformer
from ssd_pipe.errors import ConfigError
from ssd_pipe.sampling.filters import GREEDY_BELOW


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
    """

    tokens: np.ndarray
    positions: np.ndarray
    context_lens: np.ndarray
    seqs: np.ndarray
    tables: Sequence[Sequence[int] | np.ndarray]
    scratch: np.ndarray
    keys: np.ndarray | torch.Tensor
    temperature: np.ndarray


class TreeGraph:
    """The graph of R rows of W branches, K steps, block tables of ``num_blocks`` entries.

    ``after_step``, if given, is called with (this graph, step) while it is captured, after that
    step's choice is in ``chosen[step]``: what it queues (publishing, say) is part of the launch.
    ``vocab`` > 0 chooses among the first so many tokens only.

    Attributes:
        chosen: int64 [K, R, W], the branches' tokens by step.
        logits: per step, [R * W, V] in activation dtype; empty unless ``keep_logits``.
        inputs: the device tensors a launch reads.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        pool: GraphPool,
        rows: int,
        width: int,
        steps: int,
        num_blocks: int,
        keep_logits: bool = False,
        after_step: Callable[[TreeGraph, int], None] | None = None,
        vocab: int = 0,
    ) -> None:
        device = model.backend.device
        branches = rows * width
        self.rows, self.width, self.steps, self.num_blocks = rows, width, steps, num_blocks
        self._model, self._kv, self._after_step = model, kv, after_step
        self._keep_logits, self._vocab = keep_logits, vocab
        self.logits: list[torch.Tensor] = []
        self._staging = Staging(
            [
                Field("tokens", (branches,), torch.int64),
                Field("positions", (branches,), torch.int64),
                Field("slots", (branches,), torch.int64),
                Field("keys", (steps, branches), torch.int64),
                Field("live", (branches,), torch.int32),
                Field("context_lens", (branches,), torch.int32),
                Field("factors", (branches,), torch.float32),
                Field("tables", (rows, num_blocks), torch.int32),
            ],
            device,
        )
        self.inputs = self._staging.tensors

        def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.chosen = filled((steps, rows, width), torch.int64)
        self._positions = filled((steps, branches), torch.int64)
        self._slots = filled((steps, branches), torch.int64)
        self._suffix_slots = filled((branches, steps), torch.int32)
        self._suffix_lens = filled((steps, branches), torch.int32)
        seqs = torch.arange(rows, dtype=torch.int32, device=device).repeat_interleave(width)
        heads, kv_heads = len(model.shard.heads), len(model.shard.kv_heads)
        tiles = fixed_tiles(
            rows, width, tile_width(width, heads, kv_heads, model.backend.activation_dtype), device
        )
        wanted = torch.arange(branches, device=device)
        tokens = [self.inputs["tokens"], *(t.view(-1) for t in self.chosen[:-1])]
        self._batches = [
            StaticBatch(
                tokens=tokens[step],
                positions=self._positions[step],
                slots=self._slots[step],
                seqs=seqs,
                block_tables=self.inputs["tables"],
                context_lens=self.inputs["context_lens"],
                logit_index=wanted,
                suffix_slots=self._suffix_slots,
                suffix_lens=self._suffix_lens[step],
                tiles=tiles,
            )
            for step in range(steps)
        ]
        self._launch = pool.capture(self._grow, device)

    @torch.inference_mode()
    def _grow(self) -> None:
        inputs = self.inputs
        metadata = (self._positions, self._slots, self._suffix_slots, self._suffix_lens)
        expand_tree(inputs["positions"], inputs["slots"], inputs["live"], metadata, self.steps)
        self.logits = []
        for step, batch in enumerate(self._batches):
            logits = head_logits(self._model, self._model.forward(batch, self._kv), self._vocab)
            if logits is None:
                raise ConfigError("draft", "the draft's tree does not run tensor-parallel")
            choose(
                logits,
                inputs["keys"][step],
                inputs["factors"],
                out=self.chosen[step].view(-1),
            )
            if self._keep_logits:
                self.logits.append(logits)
            if self._after_step is not None:
                self._after_step(self, step)

    def run(self, tree: TreeInputs) -> np.ndarray:
        """Launch; does not wait. Returns int64 [B]: branch i is column ``result[i]`` of
        ``chosen.view(K, -1)`` and row ``result[i]`` of ``logits``.

        Raises ValueError if the branches do not fit.
        """
        seqs = np.asarray(tree.seqs, np.int64)
        counts = np.bincount(seqs, minlength=len(tree.tables))
        if len(tree.tables) > self.rows or counts.max(initial=0) > self.width:
            raise ValueError(
                f"{len(tree.tables)} rows of up to {counts.max(initial=0)} branches in a graph of "
                f"{self.rows} rows of {self.width}"
            )
        first = np.concatenate(([0], np.cumsum(counts)[:-1]))
        where: np.ndarray = seqs * self.width + np.arange(len(seqs)) - first[seqs]
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
            if len(table) > self.num_blocks:
                raise ValueError(f"row {row}: {len(table)} blocks in a graph of {self.num_blocks}")
            host["tables"][row, : len(table)] = table
        if isinstance(tree.keys, np.ndarray):
            host["keys"][:, where] = tree.keys.view(np.int64)
        self._staging.copy()
        if isinstance(tree.keys, torch.Tensor):
            column = torch.from_numpy(where).to(self.chosen.device, non_blocking=True)
            self.inputs["keys"].index_copy_(1, column, tree.keys)
        self._launch()
        return where

    def launch(self) -> None:
        """Launch on the inputs as they are on the device."""
        self._launch()


class TreeRunner:
    """Tree graphs of one draft, by bucket; made at first use.

    Args:
        steps: K. max_rows: most rows. width: most branches of a row.
        max_positions: most positions of a sequence.
        keep_logits: keep each step's logits (the rejection rule needs the distributions).
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
        keep_logits: bool = False,
        after_step: Callable[[TreeGraph, int], None] | None = None,
        vocab: int = 0,
        options: GraphOptions | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        if model.backend.name != "cuda":
            raise ConfigError("backend", f"graphs need the cuda backend, not {model.backend.name}")
        self._model, self._kv = model, kv
        self._steps, self._max_rows, self._width = steps, max_rows, width
        self._blocks = -(-max_positions // kv.block_size)
        self._keep_logits, self._after_step, self._vocab = keep_logits, after_step, vocab
        self.pool = pool or GraphPool(options)
        self._graphs: dict[int, TreeGraph] = {}

    def graph(self, rows: int) -> TreeGraph:
        """The graph for ``rows`` rows."""
        bucket = bucket_of(rows, self._max_rows)
        if bucket not in self._graphs:
            self._graphs[bucket] = TreeGraph(
                self._model,
                self._kv,
                self.pool,
                bucket,
                self._width,
                self._steps,
                self._blocks,
                self._keep_logits,
                self._after_step,
                self._vocab,
            )
        return self._graphs[bucket]

    def run(self, tree: TreeInputs) -> torch.Tensor:
        """Grow ``tree``; queued on the current stream. Returns int64 [K, B] on the device.

        Raises ValueError if the branches do not fit.
        """
        graph = self.graph(len(tree.tables))
        where = torch.from_numpy(graph.run(tree))
        device = graph.chosen.device
        if device.type == "cuda":
            where = where.pin_memory()
        return graph.chosen.view(self._steps, -1)[:, where.to(device, non_blocking=True)]
