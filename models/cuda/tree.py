"""The draft's tree decode: K steps of all branches, sampling included, in one graph launch or K.

Step j's choices are the tokens of step j + 1 and stay on the device; a copy of them goes to the
host as each step ends. A branch sees the first
``context_lens`` positions of its row's trunk, then its own tokens in its scratch slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from models.cuda.capture import GraphPool
from models.cuda.head import head_logits
from models.cuda.inputs import expand_tree
from models.cuda.noise import choose
from models.cuda.tiles import StaticBatch, fixed_tiles, tile_width
from models.cuda.tree_inputs import TreeHome, TreeInputs, TreeStaging
from models.kv_cache import KVCache
from models.transformer import Transformer


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
        self._staging = TreeStaging(rows, width, steps, num_blocks, device)
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
        self, home: TreeHome, tables: Sequence[Sequence[int]], temperatures: Sequence[float]
    ) -> None:
        """Queue what is known of a tree whose branches the GPU will choose (``models.cuda.fork``);
        ``launch_part`` from part 0 on runs it. ``home.outcomes`` is not looked at.

        Raises ValueError if the rows do not fit.
        """
        self._staging.prepare(home, tables, temperatures)

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
        where = self._staging.load(tree)
        # A tree that was cut short may still be running, and would write into the next one's.
        if self._last is not None:
            self._last.synchronize()
        self.published.fill(-1)
        self._launches[0]()
        self._note(0)
        return where

    def _note(self, part: int) -> None:
        event = self._events[part]
        if event is not None:
            event.record()
            self._last = event

    def launch(self) -> None:
        """Launch on the inputs as they are on the device."""
        for part in self._launches:
            part()
