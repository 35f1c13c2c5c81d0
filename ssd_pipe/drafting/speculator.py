"""The draft's work in one round: backup chains, glue pass, fork, branches.

The order of a round, for all of its rows together:

1. *backup*: rows whose outcome was a miss get a chain just in time, token by token (``backups``);
2. *glue*: one pass over what each trunk lacks and the chain under verification (``passes``);
3. *fork*: the outcomes worth speculating on, out of the K + 1 rows of the glue pass (``forks``, by
   the chances that ``outcomes`` gives them);
4. *branches*: K passes, each extends every branch of every row by one token, published at once
   (``growth``).

``round`` is a generator that yields between passes, so that its caller can drop the rest of a round
when the outcome has already come, but for what a GPU has queued. Where the GPU chooses the branches
(``gpu_forks``), glue pass, fork and branches are begun at once. The sequences themselves are in
``trunks``.

With several workers each does all of this, but extends and publishes only its share of the branches
(``engine.partition``). Backups are worker 0's: the others get the plan with those chains filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ipc.messages.draft import ChainReady, DraftPlan, DraftRow
from models.kv_cache import KVCache
from models.transformer import Transformer
from ssd_pipe.config import SpeculationSection, branch_budget
from ssd_pipe.drafting.backups import draft_backups
from ssd_pipe.drafting.forks import Forks
from ssd_pipe.drafting.growth import Growth
from ssd_pipe.drafting.outcomes import OutcomePredictor
from ssd_pipe.drafting.passes import DraftPasses
from ssd_pipe.drafting.round_row import RoundRow
from ssd_pipe.drafting.tree import Tree
from ssd_pipe.drafting.trunks import Trunks
from ssd_pipe.engine.blocks import BlockManager
from ssd_pipe.engine.effort import Effort
from ssd_pipe.engine.partition import Share, part_entries
from ssd_pipe.engine.speculation_cache import SpeculationCache
from ssd_pipe.sampling.grammar import Grammars

if TYPE_CHECKING:
    from ssd_pipe.drafting.forked import Forked
    from ssd_pipe.drafting.graphed import GraphedDraft


class Recipient(Protocol):
    """Where draft distributions go under the rejection rule; see ``ipc.handover``."""

    def put(self, slot: int, number: int, rows: np.ndarray | None) -> None:
        """Hand over float32 [n, V], or None if they are lost."""


class Speculator:
    """The draft model, its KV and trunks, and the writing side of the speculation cache.

    ``scratch_start`` is the first flat KV slot of the scratch region, which holds
    max_num_seqs * budget * k tokens of this worker's branches; ``blocks`` manages the KV before it.

    Attributes:
        budget: most branches of a row, all workers together.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        blocks: BlockManager,
        scratch_start: int,
        cache: SpeculationCache,
        spec: SpeculationSection,
        handover: Recipient | None,
        grammars: Grammars | None = None,
        graphs: GraphedDraft | None = None,
        share: Share = Share(),
    ) -> None:
        """``graphs`` make the passes they take; ``cache`` is the part of worker ``share``."""
        self._gpu_forks = None if graphs is None else graphs.forks
        self._share = share
        self._cache = cache
        self._handover = handover
        self._k = spec.k
        self.budget = branch_budget(spec)
        own = part_entries(self.budget, share.workers)
        taper = spec.taper if graphs is None else 1.0  # graphs extend every branch
        self._trunks = Trunks(blocks, grammars, spec.k)
        self._passes = DraftPasses(model, kv, blocks.block_size, spec, graphs)
        self._outcomes = OutcomePredictor()
        self._forks = Forks(self._passes, cache, self._outcomes, spec, share, taper)
        self._growth = Growth(self._passes, cache, self._outcomes, spec, scratch_start, own, taper)
        self._tree = Tree()

    # ------------------------------------------------------------ sequences

    def apply(self, plan: DraftPlan) -> None:
        """Take in what a plan says of the sequences, whether or not its round will run."""
        for slot in self._trunks.slots if plan.fresh else plan.drop:
            if self._trunks.drop(slot):
                self._cache.clear(slot)
                self._outcomes.forget(slot)
        for start in plan.begin:
            self._trunks.begin(start)
        for row in plan.rows:
            self._outcomes.note(self._trunks[row.slot], row.tokens)
            self._trunks.commit(row)
            if row.handover and not row.backup and self._share.makes(row.handover):
                self._hand_over_branch(row)
        if self._gpu_forks is not None and 0 < plan.record == self._gpu_forks.awaits:
            self._fed_ahead(plan)

    def _fed_ahead(self, plan: DraftPlan) -> None:
        """The GPU feeds itself what the record says that ``plan`` was made of, even if the plan's
        round is passed over."""
        for row in plan.rows:
            trunk, chain = self._trunks[row.slot], [] if row.after_miss else row.chain
            if chain or row.backup:
                trunk.fed(len(trunk.tokens) - 1, [trunk.tokens[-1], *chain])

    def prefill(self) -> bool:
        """Feed one chunk of some trunk that lags behind; False if none does."""
        feed = self._trunks.lagging_chunk()
        if feed is None:
            return False
        self.stand_down()
        self._passes.feed([feed])
        self._trunks.register(feed[0])
        return True

    def request_ids(self, plan: DraftPlan) -> list[int]:
        """Requests of a plan's rows, for logs."""
        return [self._trunks[row.slot].rid for row in plan.rows if row.slot in self._trunks]

    def tokens_of(self, slot: int) -> list[int]:
        """Committed tokens of a slot."""
        return self._trunks[slot].tokens

    @property
    def branches(self) -> int:
        """Branches of the latest round."""
        return self._tree.size

    @property
    def runs_ahead(self) -> bool:
        """Whether passes begin before anybody knows if they are wanted."""
        graphs = self._passes.graphs
        return graphs is not None and graphs.runs_ahead

    # ------------------------------------------------------------ a round

    def round(
        self,
        plan: DraftPlan,
        answer: Callable[[ChainReady], None],
        skip: Callable[[int], None] = lambda slot: None,
        interrupted: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[str]:
        """Run a plan's round; yields the stage just done: "backup", "glue", "step".

        ``skip`` is told of slots that get no branches in a leased round. The wait for a pass over
        the branches ends when ``interrupted`` says so. ``meanwhile`` is called while a GPU makes
        the glue pass.
        """
        trunks, number = self._trunks, plan.number
        effort = Effort(
            min(plan.k or self._k, self._k), min(plan.branches or self.budget, self.budget)
        )
        trunks.begin_round()
        rows = [RoundRow(row, trunks[row.slot], list(row.chain)) for row in plan.rows]
        growing = self._begun(plan, rows)
        ready = rows
        if growing is None:
            backups = [row for row in rows if row.plan.backup]
            for _ in draft_backups(
                trunks, self._passes, plan.round, backups, answer, self._hand_over
            ):
                yield "backup"
            ready = []
            for row in rows:
                if not row.plan.fork:
                    continue
                if trunks.catch_up(row.trunk, len(row.chain)):
                    ready.append(row)
                else:
                    self._pass_over(row, number, skip)
            if not ready:
                return
            growing = self._forks.fork_on_gpu(ready, number, effort)
        if growing is not None and self._gpu_forks is not None:
            forked, self._tree = growing
            tasks = (meanwhile, self._outcomes.study)
            behind = partial(self._go_ahead, rows, number)
            depth = self._k if number else effort.k
            stages = self._gpu_forks.grow(forked, depth, tasks, interrupted, behind)
            for step, _ in enumerate(stages, -1):
                if not number and step < 0:
                    self._forks.announce(ready, forked, self._tree, effort)
                elif not number:
                    self._growth.publish(self._tree, forked, step)
                yield "glue" if step < 0 else "step"
            return
        self._tree = self._forks.fork(ready, number, effort, meanwhile)
        if not self._tree.size and number:
            for row in ready:
                skip(row.plan.slot)
        yield "glue"
        for _ in self._growth.grow(self._tree, effort.k, interrupted):
            yield "step"

    def _pass_over(self, row: RoundRow, number: int, skip: Callable[[int], None]) -> None:
        """A row gets no branches."""
        if number:
            skip(row.plan.slot)
        else:
            self._cache.pass_over(row.plan.slot, row.plan.prefix_hash)

    # ------------------------------------------------------------ ahead of the outcome

    def look(self) -> None:
        """Go on with the round whose outcome the GPU has been waiting for, if it has come."""
        if self._gpu_forks is not None:
            self._gpu_forks.look()

    def stand_down(self) -> None:
        """Have the GPU wait for no outcome; before anything else uses it."""
        if self._gpu_forks is not None:
            self._gpu_forks.resolve()

    def close(self) -> None:
        """Leave nothing on the GPU that waits. No round may follow."""
        if self._gpu_forks is not None:
            self._gpu_forks.call_off()

    def _go_ahead(self, rows: Sequence[RoundRow], number: int) -> None:
        """All of a leased round is queued: queue the next one's glue pass, of its only row."""
        if self._gpu_forks is None or not number or len(rows) > 1:
            return
        [row] = rows
        reach = len(row.trunk.tokens) + 2 * (self._k + 1)
        if self._trunks.reserve(row.trunk, min(reach, self._gpu_forks.max_positions)):
            self._forks.go_ahead(row, number)

    def _begun(self, plan: DraftPlan, rows: Sequence[RoundRow]) -> tuple[Forked, Tree] | None:
        """The round, if the GPU has begun it by itself; after a miss it may have made the first
        token of the backup, which the row's chain gets."""
        if self._gpu_forks is None:
            return None
        ahead = self._gpu_forks.resolve(plan.record)
        if ahead is None or len(rows) != 1:
            return None
        [row] = rows
        if ahead.hit and row.plan.fork and row.chain and not row.plan.backup:
            return ahead.forked, self._forks.take_over(row, plan.number, ahead.forked)
        if row.plan.backup:
            row.chain.extend(ahead.backup())
        return None

    # ------------------------------------------------------------ hand-over

    def _hand_over_branch(self, row: DraftRow) -> None:
        """Distributions of a chain that came out of the cache."""
        place = self._share.place(row.entry)
        self._hand_over(row, self._tree.distributions(row.slot, place, len(row.chain)))

    def _hand_over(self, row: DraftRow, q: torch.Tensor | None) -> None:
        if row.handover and self._handover is not None:
            rows = None if q is None else q.float().cpu().numpy()
            self._handover.put(row.slot, row.handover, rows)
