"""The draft's passes on CUDA graphs: backup steps, the glue pass, and the tree of branches.

Where more than temperature and shared noise shapes the choices (filters, processors, the rejection
rule), the graphs still make the forward passes and the Speculator chooses from their logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from models.cuda.capture import GraphOptions, GraphPool
from models.cuda.graphs import GraphRunner, StepRow
from models.cuda.staging import Readback
from models.cuda.tree import TreeInputs, TreeRunner
from models.kv_cache import KVCache
from models.transformer import Transformer
from ssd_pipe.config import SpeculationSection
from ssd_pipe.drafting.candidates import TOP_CANDIDATES
from ssd_pipe.drafting.tree import Tree
from ssd_pipe.drafting.trunk import Trunk
from ssd_pipe.errors import ResourceError
from ssd_pipe.sampling.noise import SHARED, row_keys

AHEAD_BYTES = 200e6
"""Weights up to which a step of the tree is launched before the last one's tokens are looked at. A
larger draft's steps take long enough to be worth leaving out when the outcome has come."""
STUCK = 60.0  # seconds a step of the tree may take

Feed = tuple[Trunk, int, list[int], int]


class GraphedDraft:
    """One draft's graphs on one GPU.

    Args:
        scratch_start: first flat KV slot of the branches' scratch region.
        budget: branches a row.
        max_rows: most rows of a round.
        max_positions: most positions of a sequence.
        vocab: propose among the first so many tokens only, 0 = all.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        spec: SpeculationSection,
        scratch_start: int,
        budget: int,
        max_rows: int,
        max_positions: int,
        vocab: int = 0,
        options: GraphOptions | None = None,
    ) -> None:
        pool = GraphPool(options)
        self._spec, self._scratch_start, self._budget = spec, scratch_start, budget
        self._readback = Readback(model.backend.device)
        self._glue_width = spec.k + 1
        self._ahead = int(model.weight_bytes <= AHEAD_BYTES)
        self._backup = GraphRunner(model, kv, max_rows, max_positions, pool=pool)
        self._glue = GraphRunner(
            model, kv, max_rows, max_positions, top_n=TOP_CANDIDATES, pool=pool
        )
        self._trees = TreeRunner(
            model,
            kv,
            spec.k,
            max_rows,
            budget,
            max_positions,
            vocab=vocab,
            stepwise=True,
            pool=pool,
        )

    def warm_up(self, trees: bool) -> None:
        """Make the graphs that rounds can need; ``trees`` and what goes with them only for ssd."""
        self._backup.warm_up((1, self._glue_width))
        if trees:
            self._glue.warm_up((self._glue_width,))
            self._trees.warm_up()

    def chooses(self, trunks: Sequence[Trunk]) -> bool:
        """Whether the graphs can choose the tokens of these rows too: nothing but temperature and
        shared noise shapes them."""
        return all(
            trunk.rules is None
            and (trunk.key.temperature == 0 or self._spec.rule == "shared_noise")
            and (
                trunk.key.temperature == 0
                or (trunk.key.top_p >= 1 and not trunk.key.top_k and not trunk.key.min_p)
            )
            for trunk in trunks
        )

    def logits(self, feeds: Sequence[Feed]) -> torch.Tensor | None:
        """Feed rows; float32 [L, V] of the tokens from each row's fourth entry on, in order. None
        if a row is too long for a graph."""
        longest = max(len(tokens) for _, _, tokens, _ in feeds)
        if longest > self._glue_width:
            return None
        out = self._backup.run(_step_rows(feeds), 1 if longest == 1 else self._glue_width)
        parts = [
            out.logits[i, first : len(tokens)] for i, (_, _, tokens, first) in enumerate(feeds)
        ]
        return torch.cat(parts).float()

    def next_tokens(self, feeds: Sequence[Feed]) -> list[int] | None:
        """Feed rows and choose the token after each; None if they are too long for a graph."""
        longest = max(len(tokens) for _, _, tokens, _ in feeds)
        if longest > self._glue_width:
            return None
        out = self._backup.run(_step_rows(feeds), 1 if longest == 1 else self._glue_width)
        chosen = self._readback.fetch("chosen", out.chosen)
        self._readback.wait()
        return [int(chosen[i, len(tokens) - 1]) for i, (_, _, tokens, _) in enumerate(feeds)]

    def candidates(self, feeds: Sequence[Feed]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """The glue pass: what ``draft_choice.fork_candidates`` gives for the fed tokens from each
        row's fourth entry on; None if a row is too long for a graph."""
        if max(len(tokens) for _, _, tokens, _ in feeds) > self._glue_width:
            return None
        out = self._glue.run(_step_rows(feeds), self._glue_width)
        if out.top_tokens is None or out.top_scores is None or out.next_scores is None:
            raise RuntimeError("the glue graph keeps no candidates")
        tokens = self._readback.fetch("tokens", out.top_tokens)
        scores = self._readback.fetch("scores", out.top_scores)
        own = self._readback.fetch("own", out.next_scores)
        self._readback.wait()
        wanted = [(i, slice(first, len(fed))) for i, (_, _, fed, first) in enumerate(feeds)]
        return (
            np.concatenate([tokens[at] for at in wanted]),
            np.concatenate([scores[at] for at in wanted]).astype(np.float64),
            np.concatenate([own[at] for at in wanted]).astype(np.float64),
        )

    def grow(self, tree: Tree, meanwhile: Callable[[], None]) -> Iterator[dict[int, np.ndarray]]:
        """Extend all branches; gives each depth's tokens by slot, as soon as they are there.

        Left early, it launches no further steps. ``meanwhile`` is called once the GPU is busy.
        """
        rows = list(tree.rows.values())
        counts = [len(row.outcomes) for row in rows]
        inputs = self._inputs(tree)
        graph = self._trees.graph_of(inputs)
        where = graph.begin(inputs)
        launched = 1
        ends = np.cumsum(counts).tolist()
        for step in range(self._spec.k):
            # The next step of a small draft is queued before this one's tokens are looked at: it
            # is shorter than what a launch takes.
            while launched < min(step + 1 + self._ahead, graph.launches):
                graph.launch_part(launched)
                launched += 1
            if step == 0:
                meanwhile()
            tokens = self._wait(graph.published[step], where)
            yield {
                row.row.slot: tokens[end - count : end]
                for row, count, end in zip(rows, counts, ends, strict=True)
            }

    def grow_chosen(
        self, tree: Tree, choose: Callable[[int, torch.Tensor], Sequence[int]]
    ) -> Iterator[int]:
        """Extend all branches by what ``choose`` takes from each step's logits.

        ``choose(step, logits)`` gets float32 [B, V], branches in the tree's order, and returns
        their tokens. Gives the number of each step done; left early, it launches no further ones.
        """
        inputs = self._inputs(tree)
        graph = self._trees.graph_of(inputs)
        device = graph.chosen.device
        where = torch.from_numpy(graph.begin(inputs)).to(device)
        for step in range(self._spec.k):
            if step:
                graph.launch_part(step)
            chosen = choose(step, graph.logits[where].float())
            graph.choose(step, where, torch.tensor(chosen, device=device))
            yield step

    def _inputs(self, tree: Tree) -> TreeInputs:
        rows = list(tree.rows.values())
        counts = [len(row.outcomes) for row in rows]
        outcomes = np.array([o for row in rows for o in row.outcomes], np.int64).reshape(-1, 2)
        seqs = np.repeat(np.arange(len(rows)), counts)
        rank = np.concatenate([np.arange(count) for count in counts])
        start = np.array([len(row.trunk.tokens) for row in rows])[seqs] + outcomes[:, 0]
        slots = np.array([row.row.slot for row in rows])[seqs]
        temperature = np.array([row.trunk.key.temperature for row in rows])[seqs]
        keys = np.zeros((self._spec.k, len(start)), np.uint64)
        if temperature.any():
            seeds = np.array([row.trunk.key.seed for row in rows], np.uint64)[seqs]
            keys = row_keys(seeds, start + 1 + np.arange(self._spec.k)[:, None], SHARED)
        return TreeInputs(
            tokens=outcomes[:, 1],
            positions=start,
            context_lens=start,
            seqs=seqs,
            tables=[row.trunk.table.blocks for row in rows],
            scratch=self._scratch_start + (slots * self._budget + rank) * self._spec.k,
            keys=keys,
            temperature=temperature,
        )

    @staticmethod
    def _wait(published: np.ndarray, where: np.ndarray) -> np.ndarray:
        """The tokens of one depth, once all have arrived; each is one aligned 8-byte store."""
        deadline = time.monotonic() + STUCK
        while True:
            tokens = published[where]
            if tokens.min() >= 0:
                return tokens
            if time.monotonic() > deadline:
                raise ResourceError(f"no tokens from the GPU within {STUCK:.0f} s")


def _step_rows(feeds: Sequence[Feed]) -> list[StepRow]:
    return [
        StepRow(trunk.table.blocks, start, tokens, trunk.key.seed, trunk.key.temperature)
        for trunk, start, tokens, _ in feeds
    ]
