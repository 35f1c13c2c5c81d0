"""The draft's tree decode: K steps of all branches, sampling included, in one graph launch or K.

Step j's choices are the tokens of step j + 1 and stay on the device; a copy of them goes to the
host as each step ends. A branch sees the first
``context_lens`` positions of its row's trunk, then its own tokens in its scratch slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from ipc.errors import ConfigError
from ipc.messages.sampling import GREEDY_BELOW
from models.cuda.capture import (
    GraphOptions,
    GraphPool,
    bucket_of,
    context_bucket,
    context_buckets,
    row_buckets,
)
from models.cuda.graphs import head_logits
from models.cuda.inputs import expand_tree
from models.cuda.noise import choose
from models.cuda.staging import Field, Staging
from models.cuda.tiles import StaticBatch, fixed_tiles, tile_width
from models.kv_cache import KVCache
from models.transformer import Transformer


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
        lease: the branches are for a leased round, None otherwise; see ``models.cuda.rounds``.
    """

    tokens: np.ndarray
    positions: np.ndarray
    context_lens: np.ndarray
    seqs: np.ndarray
    tables: Sequence[Sequence[int] | np.ndarray]
    scratch: np.ndarray
    keys: np.ndarray | torch.Tensor
    temperature: np.ndarray
    lease: LeasedTree | None = None


@dataclass(slots=True)
class LeasedTree:
    """Where branches are published from the device.

    Attributes:
        number: the leased round whose outcomes they are for.
        homes: int64 [R], slot of each row in the cache.
        hashes: uint64 [R], prefix hash of each row.
        outcomes: int64 [B], k << 32 | t*; empty where the GPU chooses them.
    """

    number: int
    homes: np.ndarray
    hashes: np.ndarray
    outcomes: np.ndarray


class TreeHooks(Protocol):
    """Publishes branches from the device, as part of every launch.

    Round number (0 = not leased), slot and hash of a row are the inputs "numbers", "homes" and
    "hashes", int64 [R]; outcomes are "outcomes", int64 [R, W], -1 for none.
    """

    def begin(self, graph: TreeGraph) -> None:
        """The outcomes, before the first step."""

    def step(self, graph: TreeGraph, step: int) -> None:
        """``chosen[step]`` is there."""


class TreeGraph:
    """The graph of R rows of W branches, K steps, block tables of ``num_blocks`` entries.

    ``vocab`` > 0 chooses among the first so many tokens only. ``stepwise``: each step is a graph of
    its own, so that the rest of a tree nobody wants any more is never launched. ``logits`` is where
    every step puts its logits, [R * W or more, V].

    Attributes:
        chosen: int64 [K, R, W], the branches' tokens by step.
        published: the same in pinned host memory; -1 where the step has not ended.
        logits: [R * W, V] in activation dtype, of the newest step.
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
        logits: torch.Tensor,
        hooks: TreeHooks | None = None,
        vocab: int = 0,
        stepwise: bool = False,
    ) -> None:
        device = model.backend.device
        branches = rows * width
        self.rows, self.width, self.steps, self.num_blocks = rows, width, steps, num_blocks
        self._model, self._kv, self._hooks = model, kv, hooks
        self._vocab = vocab
        self.logits = logits[:branches]
        fields = [
            Field("tokens", (branches,), torch.int64),
            Field("positions", (branches,), torch.int64),
            Field("slots", (branches,), torch.int64),
            Field("keys", (steps, branches), torch.int64),
            Field("live", (branches,), torch.int32),
            Field("context_lens", (branches,), torch.int32),
            Field("factors", (branches,), torch.float32),
            Field("tables", (rows, num_blocks), torch.int32),
        ]
        if hooks is not None:
            fields += [Field(name, (rows,), torch.int64) for name in ("numbers", "homes", "hashes")]
            fields.append(Field("outcomes", (rows, width), torch.int64))
        self._staging = Staging(fields, device)
        self.inputs = self._staging.tensors

        def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.chosen = filled((steps, rows, width), torch.int64)
        pinned = device.type == "cuda"
        self._published = torch.zeros((steps, branches), dtype=torch.int64, pin_memory=pinned)
        self.published: np.ndarray = self._published.numpy()
        self._last: torch.cuda.Event | None = None
        self._positions = filled((steps, branches), torch.int64)
        self._slots = filled((steps, branches), torch.int64)
        self._suffix_slots = filled((branches, steps), torch.int32)
        self._suffix_lens = filled((steps, branches), torch.int32)
        seqs = torch.arange(rows, dtype=torch.int32, device=device).repeat_interleave(width)
        heads, kv_heads = len(model.shard.heads), len(model.shard.kv_heads)
        dtype = model.backend.activation_dtype
        tile = tile_width(width, heads, kv_heads, dtype, branches=True)
        tiles = fixed_tiles(rows, width, tile, device)
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
        parts = [[step] for step in range(steps)] if stepwise else [list(range(steps))]
        self._launches = [pool.capture(partial(self._grow, part), device) for part in parts]
        self._events = [torch.cuda.Event() if pinned else None for _ in parts]

    @property
    def launches(self) -> int:
        """Launches that make up a tree."""
        return len(self._launches)

    @torch.inference_mode()
    def _grow(self, steps: list[int]) -> None:
        inputs = self.inputs
        if steps[0] == 0:
            metadata = (self._positions, self._slots, self._suffix_slots, self._suffix_lens)
            expand_tree(inputs["positions"], inputs["slots"], inputs["live"], metadata, self.steps)
            if self._hooks is not None:
                self._hooks.begin(self)
        for step in steps:
            batch = self._batches[step]
            hidden = self._model.forward(batch, self._kv)
            logits = head_logits(self._model, hidden, self._vocab, self.logits)
            chosen = self.chosen[step].view(-1)
            choose(logits, inputs["keys"][step], inputs["factors"], out=chosen)
            self._published[step].copy_(chosen, non_blocking=True)
            if self._hooks is not None:
                self._hooks.step(self, step)

    def prepare(
        self, lease: LeasedTree, tables: Sequence[Sequence[int]], temperatures: Sequence[float]
    ) -> None:
        """Queue what is known of a tree whose branches the GPU will choose (``models.cuda.fork``);
        ``launch_part`` from part 0 on runs it. ``lease.outcomes`` is not looked at.

        Raises ValueError if the rows do not fit.
        """
        self._staging.wait()
        host = self._staging.host
        host["live"].fill(0)
        host["context_lens"].fill(0)
        factors = host["factors"].reshape(self.rows, self.width)
        for row, (table, temperature) in enumerate(zip(tables, temperatures, strict=True)):
            if row >= self.rows or len(table) > self.num_blocks:
                raise ValueError(f"row {row}: {len(table)} blocks do not fit the graph")
            host["tables"][row, : len(table)] = table
            factors[row] = 0.0 if temperature < GREEDY_BELOW else 1.0 / temperature
        self._load_lease(host, lease, np.empty(0, np.int64))
        self._staging.copy()

    def ended(self, part: int) -> bool:
        """Whether the last launch of a part is through."""
        event = self._events[part]
        return event is None or event.query()

    def run(self, tree: TreeInputs) -> np.ndarray:
        """Launch all of a tree; does not wait. Returns what ``begin`` does, and raises likewise."""
        where = self.begin(tree)
        for part in range(1, self.launches):
            self.launch_part(part)
        return where

    def choose(self, step: int, where: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put int64 [B] ``tokens`` in the place of those step ``step`` chose; the next step, not
        launched yet, is fed them. ``where``: int64 [B], what ``begin`` returned, on the device."""
        self.chosen[step].view(-1).index_copy_(0, where, tokens)

    def launch_part(self, part: int) -> None:
        """Launch part 1, 2, ... of the tree that ``begin`` began, or any of one ``prepare``d."""
        self._launches[part]()
        self._note(part)

    def begin(self, tree: TreeInputs) -> np.ndarray:
        """Launch a tree's first part; does not wait. Returns int64 [B]: branch i is column
        ``result[i]`` of ``chosen.view(K, -1)`` and row ``result[i]`` of ``logits``.

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
        if self._hooks is not None:
            self._load_lease(host, tree.lease, where)
        if isinstance(tree.keys, np.ndarray):
            host["keys"][:, where] = tree.keys.view(np.int64)
        self._staging.copy()
        if isinstance(tree.keys, torch.Tensor):
            column = torch.from_numpy(where).to(self.chosen.device, non_blocking=True)
            self.inputs["keys"].index_copy_(1, column, tree.keys)
        # A tree that was cut short may still be running, and would write into the next one's.
        if self._last is not None:
            self._last.synchronize()
        self.published.fill(-1)
        self._launches[0]()
        self._note(0)
        return where

    @staticmethod
    def _load_lease(
        host: dict[str, np.ndarray], lease: LeasedTree | None, where: np.ndarray
    ) -> None:
        host["numbers"].fill(0)
        if lease is None:
            return
        rows = len(lease.homes)
        host["numbers"][:rows] = lease.number
        host["homes"][:rows] = lease.homes
        host["hashes"].view(np.uint64)[:rows] = lease.hashes
        host["outcomes"].fill(-1)
        host["outcomes"].reshape(-1)[where] = lease.outcomes[: len(where)]

    def _note(self, part: int) -> None:
        event = self._events[part]
        if event is not None:
            event.record()
            self._last = event

    def launch(self) -> None:
        """Launch on the inputs as they are on the device."""
        for part in self._launches:
            part()


class TreeRunner:
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
        if model.backend.name != "cuda":
            raise ConfigError("backend", f"graphs need the cuda backend, not {model.backend.name}")
        self._model, self._kv = model, kv
        self._steps, self._max_rows, self._width = steps, max_rows, width
        self._max_blocks = -(-max_positions // kv.block_size)
        self._hooks, self._vocab, self._stepwise = hooks, vocab, stepwise
        self._logits = torch.empty(
            (max_rows * width, vocab or model.config.vocab_size),
            dtype=model.backend.activation_dtype,
            device=model.backend.device,
        )
        self.pool = pool or GraphPool(options)
        self._graphs: dict[tuple[int, int], TreeGraph] = {}

    def graph(self, rows: int, blocks: int = 1) -> TreeGraph:
        """The graph for ``rows`` rows of up to ``blocks`` blocks each."""
        context = context_bucket(blocks, self._kv.block_size, self._max_blocks)
        key = (bucket_of(rows, self._max_rows), context)
        if key not in self._graphs:
            self._graphs[key] = TreeGraph(
                self._model,
                self._kv,
                self.pool,
                key[0],
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
        for rows in row_buckets(self._max_rows):
            for blocks in context_buckets(self._kv.block_size, self._max_blocks):
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
