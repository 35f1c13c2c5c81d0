"""The branches of a round, extended token by token and published depth by depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from ssd_pipe.config import SpeculationSection
from ssd_pipe.drafting.outcomes import OutcomePredictor
from ssd_pipe.drafting.passes import DraftPasses, Proposed
from ssd_pipe.drafting.tree import BranchBatches, Tree
from ssd_pipe.engine.speculation_cache import SpeculationCache

if TYPE_CHECKING:
    from ssd_pipe.drafting.forked import Forked

MASK_SECONDS = 0.002
"""What a pass over branches may spend on grammar masks, likeliest branches first; a complex grammar
takes .5 ms a mask. Further tokens are proposed without one."""

Propose = Callable[..., Proposed]
"""``DraftPasses.propose`` or ``propose_from``."""


class Growth:
    """Extends branches by passes that take all of them at once.

    Args:
        cache: this worker's part of the speculation cache.
        predictor: studies while the GPU is busy, or before the first pass.
        scratch_start: first flat KV slot of the branches' scratch region.
        budget: most branches of a row that are this worker's.
        taper: share of the branches that go on to the next depth.
    """

    def __init__(
        self,
        passes: DraftPasses,
        cache: SpeculationCache,
        predictor: OutcomePredictor,
        spec: SpeculationSection,
        scratch_start: int,
        budget: int,
        taper: float,
    ) -> None:
        self._passes = passes
        self._cache = cache
        self._predictor = predictor
        self._k = spec.k
        self._scratch_start = scratch_start
        self._budget = budget
        self._taper = taper

    def grow(self, tree: Tree, depth: int, interrupted: Callable[[], bool]) -> Iterator[None]:
        """Extend the branches by ``depth`` tokens; yields after each pass.

        Ends early when ``interrupted`` says so during a wait for a pass.
        """
        if not tree.size:
            return
        graphs = self._passes.choosing([b.trunk for b in tree.rows.values()])
        if graphs is None:
            yield from self._grow_chosen(tree, depth)
            return
        grown_by_depth = graphs.grow(tree, self._predictor.study, interrupted)
        for done, grown in enumerate(grown_by_depth, 1):
            for slot, tokens in grown.items():
                if len(tokens) and not tree.number:
                    self._cache.publish_depth(slot, done, tokens)
            yield
            if done == depth:
                return

    def publish(self, tree: Tree, forked: Forked, step: int) -> None:
        """Step ``step`` of a tree that the GPU chose is through: publish its tokens."""
        grown = forked.tree.published[step].reshape(forked.tree.rows, forked.tree.width)
        for tokens, (slot, count) in zip(grown, tree.announced.items(), strict=False):
            if count:
                self._cache.publish_depth(slot, step + 1, tokens[:count])

    def _grow_chosen(self, tree: Tree, depth: int) -> Iterator[None]:
        """``grow`` where tokens are chosen here, from hidden states or a graph's logits."""
        self._predictor.study()
        passes, taper = self._passes, self._taper
        branches = BranchBatches(tree, self._scratch_start, self._budget, self._k, passes.device)
        suffixes = tree.suffixes()

        def choose(step: int, scores: torch.Tensor, propose: Propose) -> list[int]:
            """The tokens of pass ``step``, published."""
            alive, spans = branches.alive(step, taper)
            chosen, q = propose(
                scores,
                branches.sampling(alive),
                branches.chosen_positions(step, alive),
                [step] * len(alive),
                suffixes.places(alive),
                MASK_SECONDS,
            )
            suffixes.extend(alive, chosen)
            branches.tokens[alive] = chosen
            tree.q.append(q)
            tree.spans.append(spans)
            for slot, span in spans.items():
                if span.start < span.stop:
                    self._cache.publish_depth(slot, step + 1, chosen[span])
            return chosen

        if passes.graphs is not None:
            from_logits = partial(choose, propose=passes.propose_from)
            grown = passes.graphs.grow_chosen(tree, from_logits)
            for done, _ in enumerate(grown, 1):
                yield
                if done == depth:
                    return
            return
        for step in range(depth):
            alive, _ = branches.alive(step, taper)
            if not len(alive):
                return
            choose(step, passes.extend(branches.batch(step, alive)), passes.propose)
            yield
