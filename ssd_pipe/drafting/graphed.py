"""The draft's passes on CUDA graphs: backup steps, the glue pass, and the tree of branches.

Where more than temperature and shared noise shapes the choices (filters, processors, the rejection
rule), the graphs still make the forward passes and ``DraftPasses`` chooses from their logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from models.cuda.capture import GraphPool
from models.cuda.fork import able
from models.cuda.fork_hooks import ForkHooks
from models.cuda.graph_runner import GraphRunner
from models.cuda.rounds.follow import Follower
from models.cuda.staging import Readback
from models.cuda.tree import TreeHooks
from models.cuda.tree_runner import TreeRunner
from models.kv_cache import KVCache
from models.transformer import Transformer
from ssd_pipe.config import SpeculationSection
from ssd_pipe.drafting.candidates import TOP_CANDIDATES
from ssd_pipe.drafting.gpu_forks import GpuForks
from ssd_pipe.drafting.gpu_waits import wait_for_tokens
from ssd_pipe.drafting.graph_inputs import step_rows, tree_inputs
from ssd_pipe.drafting.graphed_chains import GraphedChains
from ssd_pipe.drafting.tree import Tree
from ssd_pipe.drafting.trunk import Feed, Trunk

AHEAD_BYTES = 200e6
"""Weights up to which steps of the tree are launched before the last one's tokens are looked at. A
larger draft's steps take long enough to be worth leaving out when the outcome has come."""


class GraphedDraft:
    """One draft's graphs on one GPU.

    Args:
        scratch_start: first flat KV slot of the branches' scratch region.
        budget: branches a row, of this worker.
        max_rows: most rows of a round.
        max_positions: most positions of a sequence.
        vocab: propose among the first so many tokens only, 0 = all.
        hooks: publish the branches of leased rounds.
        follower: waits for the outcomes of leased rounds; None where nobody does.
        workers: draft workers that share the branches.

    Attributes:
        chains: passes of one token a row.
        forks: rounds whose branches the GPU chooses, None where it cannot.
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
        hooks: TreeHooks | None = None,
        follower: Follower | None = None,
        workers: int = 1,
    ) -> None:
        pool = GraphPool()
        self._spec, self._scratch_start, self._budget = spec, scratch_start, budget
        self._readback = Readback(model.backend.device)
        self._glue_width = spec.k + 1
        self._ahead = int(model.weight_bytes <= AHEAD_BYTES)
        self.chains = GraphedChains(model, kv, spec.k + 1, max_rows, max_positions, pool)
        self._trees = TreeRunner(
            model,
            kv,
            spec.k,
            max_rows,
            budget,
            max_positions,
            hooks=hooks,
            vocab=vocab,
            stepwise=True,
            pool=pool,
        )
        device = model.backend.device
        follower = Follower(None, device) if follower is None else follower
        self._fork: ForkHooks | None = None
        if able(model.config.vocab_size, TOP_CANDIDATES):
            self._fork = ForkHooks(
                max_rows,
                self._glue_width,
                device,
                scratch_start,
                self._trees.graph,
                follower,
                workers,
            )
        self._glue = GraphRunner(
            model,
            kv,
            max_rows,
            max_positions,
            top_n=TOP_CANDIDATES,
            hooks=self._fork,
            pool=pool,
        )
        self.forks: GpuForks | None = None
        if self._fork is not None:
            self.forks = GpuForks(
                self._trees,
                self._glue,
                self._fork,
                self._glue_width,
                spec.k if self._ahead else 0,
                max_positions,
                follower,
            )

    def warm_up(self, trees: bool) -> None:
        """Make the graphs that rounds can need; ``trees`` and what goes with them only for ssd."""
        self.chains.warm_up()
        if trees:
            self._trees.warm_up()
            self._glue.warm_up((self._glue_width,))

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

    @property
    def runs_ahead(self) -> bool:
        """Whether steps of a tree are launched before anybody knows if they are wanted."""
        return bool(self._ahead)

    def _forget_row(self) -> None:
        if self.forks is not None:
            self.forks.forget_row()

    def candidates(
        self, feeds: Sequence[Feed], meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """The glue pass: what ``draft_choice.fork_candidates`` gives for the fed tokens from each
        row's fourth entry on; None if a row is too long for a graph. ``meanwhile`` is called once
        the GPU is busy."""
        if max(len(tokens) for _, _, tokens, _ in feeds) > self._glue_width:
            return None
        if self._fork is not None:
            self._forget_row()
            blocks = max(len(trunk.table.blocks) for trunk, *_ in feeds)
            self._trees.graph(len(feeds), blocks)  # the glue graph, if it is new, asks for it
            self._fork.disarm()
        out = self._glue.run(step_rows(feeds), self._glue_width)
        if out.top_tokens is None or out.top_scores is None or out.next_scores is None:
            raise RuntimeError("the glue graph keeps no candidates")
        tokens = self._readback.fetch("tokens", out.top_tokens)
        scores = self._readback.fetch("scores", out.top_scores)
        own = self._readback.fetch("own", out.next_scores)
        meanwhile()
        self._readback.wait()
        wanted = [(i, slice(first, len(fed))) for i, (_, _, fed, first) in enumerate(feeds)]
        return (
            np.concatenate([tokens[at] for at in wanted]),
            np.concatenate([scores[at] for at in wanted]).astype(np.float64),
            np.concatenate([own[at] for at in wanted]).astype(np.float64),
        )

    def grow(
        self,
        tree: Tree,
        meanwhile: Callable[[], None],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator[dict[int, np.ndarray]]:
        """Extend all branches; gives each depth's tokens by slot, as soon as they are there.

        Left early, or ``interrupted``, it launches no further steps. ``meanwhile`` is called once
        the GPU is busy.
        """
        rows = list(tree.rows.values())
        counts = [len(row.outcomes) for row in rows]
        inputs = tree_inputs(tree, self._spec.k, self._budget, self._scratch_start)
        self._forget_row()
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
            tokens = wait_for_tokens(graph.published[step], where, interrupted)
            if tokens is None:
                return
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
        inputs = tree_inputs(tree, self._spec.k, self._budget, self._scratch_start)
        self._forget_row()
        graph = self._trees.graph_of(inputs)
        device = graph.chosen.device
        where = torch.from_numpy(graph.begin(inputs)).to(device)
        for step in range(self._spec.k):
            if step:
                graph.launch_part(step)
            chosen = choose(step, graph.logits[where].float())
            graph.choose(step, where, torch.tensor(chosen, device=device))
            yield step
