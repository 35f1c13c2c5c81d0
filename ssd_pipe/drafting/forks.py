"""The fork of a round: which outcomes of the verification under way get a branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ipc.messages.draft import DraftRow
from ssd_pipe.config import SpeculationSection, fan_out_counts
from ssd_pipe.drafting.candidates import TOP_CANDIDATES, ChainScores
from ssd_pipe.drafting.outcomes import OutcomePredictor
from ssd_pipe.drafting.passes import DraftPasses
from ssd_pipe.drafting.round_row import RoundRow
from ssd_pipe.drafting.tree import Branches, Tree
from ssd_pipe.drafting.trunk import mark_fed
from ssd_pipe.engine import fanout
from ssd_pipe.engine.effort import Effort
from ssd_pipe.engine.partition import Share
from ssd_pipe.engine.speculation_cache import SpeculationCache
from ssd_pipe.sampling.noise import ACCEPT, round_stream, row_keys, uniforms

if TYPE_CHECKING:
    from ssd_pipe.drafting.forked import Forked
    from ssd_pipe.drafting.gpu_forks import GpuForks

MISS_EXPONENT = 0.7
"""Power-law exponent r of the miss rate against fan-out (Kumar et al., arXiv 2603.03251, Theorem
12)."""

Choice = tuple[int, int, float, list[list[int]]]
"""How the GPU is to choose a row's branches: the rank of the first that is this worker's, at most
how many of all workers, the temperature of the softmax over scores, and at most how many at each
accepted length of a chain of 0, 1, ..., K tokens."""


class Forks:
    """Chooses the branches and announces them in the speculation cache.

    Args:
        cache: the part of worker ``share``.
        predictor: says how likely each outcome is.
        taper: share of the branches that go on to the next depth.
    """

    def __init__(
        self,
        passes: DraftPasses,
        cache: SpeculationCache,
        predictor: OutcomePredictor,
        spec: SpeculationSection,
        share: Share,
        taper: float,
    ) -> None:
        self._passes = passes
        self._cache = cache
        self._predictor = predictor
        self._spec = spec
        self._share = share
        self._taper = taper
        hit = fan_out_counts(spec.fan_out, spec.k)
        miss = hit if spec.fan_out_miss is None else fan_out_counts(spec.fan_out_miss, spec.k)
        self._counts = {False: hit, True: miss}  # by row.plan.after_miss
        self._full = sum(hit)
        self._limits: dict[tuple[bool, int], list[list[int]]] = {}  # by after_miss, most branches

    def fork(
        self,
        rows: Sequence[RoundRow],
        number: int,
        effort: Effort,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Tree:
        """Glue pass and choice of branches; publishes the outcomes with no tokens yet.

        Those for leased round ``number`` are published by the GPU that extends them; 0 is a round
        without a lease.
        """
        tokens, scores, own = self._passes.candidates(rows, meanwhile)
        tree = Tree(number=number)
        first = 0
        for row in rows:
            plan, trunk, chain = row
            span = slice(first, first + len(chain) + 1)
            first = span.stop
            found = ChainScores(
                tokens[span], scores[span], chain, own[span][: len(chain)], _tests(row)
            )
            ranked = self._select(row, found, effort.branches)
            self._predictor.ask(plan.slot, found)
            outcomes = self._share.of(plan.slot, ranked)
            branches = Branches(plan, trunk, chain, outcomes, len(ranked), self._share)
            tree.rows[plan.slot] = branches
            if not number:
                partly = self._taper < 1 or effort.k < self._spec.k
                goals = branches.goals(effort.k, self._taper) if partly else None
                self._announce(plan, outcomes, goals)
        return tree

    def fork_on_gpu(
        self, rows: Sequence[RoundRow], number: int, effort: Effort
    ) -> tuple[Forked, Tree] | None:
        """``fork`` and the tree's first step without the host between; None, with nothing done, if
        a row needs more than that. Without a lease ``announce`` is due once the glue pass is
        through."""
        forks = self._gpu_forks(rows)
        if forks is None:
            return None
        feeds = [row.feed() for row in rows]
        choices = [self._choice(row, row.plan.after_miss, effort.branches) for row in rows]
        slots = [row.plan.slot for row in rows]
        hashes = [row.plan.prefix_hash for row in rows]
        forked = forks.fork(feeds, slots, hashes, number, choices)
        if forked is None:
            return None
        mark_fed(feeds)
        for i, (row, feed) in enumerate(zip(rows, feeds, strict=True)):
            self._predictor.ask(row.plan.slot, forked.pending(i, feed[3], row.chain))
        size = sum(budget for _, budget, _, _ in choices) if number else 0
        return forked, Tree(number=number, forked=size)

    def announce(
        self, rows: Sequence[RoundRow], forked: Forked, tree: Tree, effort: Effort
    ) -> None:
        """Publish the outcomes that the GPU has chosen for rounds without a lease, with no tokens
        yet; they are the branches of ``tree``."""
        for i, row in enumerate(rows):
            outcomes = forked.outcomes(i)
            tree.announced[row.plan.slot] = len(outcomes)
            goals = [effort.k] * len(outcomes) if effort.k < self._spec.k else None
            self._announce(row.plan, outcomes, goals)
        tree.forked = sum(tree.announced.values())

    def _announce(
        self, row: DraftRow, outcomes: Sequence[tuple[int, int]], goals: list[int] | None
    ) -> None:
        if not outcomes:
            self._cache.pass_over(row.slot, row.prefix_hash)
            return
        entries = [(row.prefix_hash, k, t) for k, t in outcomes]
        self._cache.begin_round(row.slot, entries, goals)

    def go_ahead(self, row: RoundRow, number: int) -> None:
        """Have the GPU make the glue pass and the choice of branches after the outcome of leased
        round ``number``, of which this is the only row, as soon as that is known.

        The trunk has blocks for whatever the outcome is. Does nothing where that cannot be.
        """
        forks = self._gpu_forks([row])
        if forks is None or not forks.follows:
            return
        choice = self._choice(row, False, self._full)
        plan = row.plan
        forks.go_ahead(row.trunk, plan.slot, (number, plan.place), plan.prefix_hash, choice)

    def take_over(self, row: RoundRow, number: int, forked: Forked) -> Tree:
        """The tree of leased round ``number`` that ``go_ahead`` has led to."""
        self._predictor.ask(row.plan.slot, forked.pending(0, 0, row.chain))
        return Tree(number=number, forked=sum(self._counts[False]))

    def _gpu_forks(self, rows: Sequence[RoundRow]) -> GpuForks | None:
        """What chooses the branches of these rows without the host, if that can be."""
        if self._spec.allocation == "geometric":
            return None
        graphs = self._passes.choosing([row.trunk for row in rows])
        return None if graphs is None else graphs.forks

    def _choice(self, row: RoundRow, after_miss: bool, most: int) -> Choice:
        limits = self._limits.get((after_miss, most))
        counts = self._counts[after_miss]
        budget = min(sum(counts), most)
        if limits is None:
            lengths = range(self._spec.k + 1)
            limits = [self._limits_of(counts, budget, length) for length in lengths]
            self._limits[after_miss, most] = limits
        rank = self._share.first(row.plan.slot)
        return rank, budget, self._predictor.tau(row.trunk.key), limits

    def _limits_of(self, counts: list[int], budget: int, length: int) -> list[int]:
        """Most branches at each accepted length of a chain of ``length`` tokens."""
        if self._spec.allocation == "confidence":
            return [TOP_CANDIDATES] * (length + 1)
        whole = length == self._spec.k and budget == sum(counts)
        return counts if whole else fanout.uniform(budget, length)

    def _select(self, row: RoundRow, scores: ChainScores, most: int) -> list[tuple[int, int]]:
        """The outcomes (k, t*) of a row that all workers together extend, at most ``most``,
        likeliest first."""
        counts, allocation = self._counts[row.plan.after_miss], self._spec.allocation
        accept, weights = self._predictor.weights(row.trunk.key, scores)
        length = len(row.chain)
        # The chain's own token cannot be the recovery token.
        own = np.append(np.array(row.chain, np.int64), -1)[:, None]
        tokens = np.where(scores.tokens == own, -1, scores.tokens)
        budget = min(sum(counts), most)
        per_k: list[int] | None = None
        if allocation == "geometric":
            acceptance = float(accept.mean()) if length else 0.5
            per_k = fanout.geometric(budget, length, acceptance, MISS_EXPONENT)
        elif allocation != "confidence":
            per_k = self._limits_of(counts, budget, length)
        return fanout.select_branches(tokens, weights, accept, per_k, budget)


def _tests(row: RoundRow) -> np.ndarray | None:
    """Uniforms float64 [K] that will test a chain drawn from the draft; None without."""
    length = len(row.chain)
    if not row.plan.handover or not length:
        return None
    offsets = np.arange(length)
    streams = round_stream(ACCEPT, offsets)
    return uniforms(row_keys([row.trunk.key.seed], len(row.trunk.tokens) + offsets, streams))
