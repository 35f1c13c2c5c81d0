"""Runs target steps: one forward pass over every row's tokens, then the acceptance rule.

Every tensor-parallel rank runs the same plans; rank 0 has the logits and judges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ipc.messages.target import Ahead, RowOutcome, SeqStart, StepPlan, StepRow
from models.kv_cache import KVCache
from models.sequence_batch import BatchRow, build_batch
from models.transformer import Transformer
from ssd_pipe.config import Rule
from ssd_pipe.sampling import shared_noise
from ssd_pipe.sampling.grammar import Grammars
from ssd_pipe.sampling.processors import TrackedRules
from ssd_pipe.verification.judging import Judge, Proposals, SlotState

if TYPE_CHECKING:
    from models.cuda.graphs import StepGraph
    from ssd_pipe.verification.graphed import GraphedSteps, Row


@dataclass(slots=True)
class Verified:
    """Outcomes of the sampled rows, in the plan's order, and when the layers were through (ns);
    the head is part of the choice of tokens where that is fused.

    ``mailed_ns``: when a step that was launched ahead got its input, 0 for any other.
    """

    outcomes: list[RowOutcome]
    forward_ns: int
    mailed_ns: int = 0


class Verifier:
    """The target model, its KV, and the slots of the running sequences."""

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        block_size: int,
        rule: Rule,
        proposals: Proposals,
        grammars: Grammars | None = None,
        steps: GraphedSteps | None = None,
    ) -> None:
        """Without ``grammars``, requests that have one fail. ``steps`` run what they take."""
        self._model = model
        self._grammars = grammars
        self._kv = kv
        self._block_size = block_size
        self._rule = rule
        self._steps = steps
        self._slots: dict[int, SlotState] = {}
        self._judge = Judge(model, rule, proposals, self._slots)
        self._queued: StepPlan | None = None
        self._mailed_ns = 0  # see Verified

    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> Verified:
        """Execute one plan. Returns no outcomes on ranks other than 0.

        ``meanwhile`` is called again and again while a graph runs; it may call ``go_on``.
        """
        queued, self._queued = self._queued, None
        if queued is plan and self._steps is not None:
            return self._judge_graphed(self._steps, plan.rows, meanwhile)
        begun = self._take_up(plan)
        if self._steps is None:
            return self._run_eager(plan.rows)
        if begun:
            return self._judge_graphed(self._steps, plan.rows, meanwhile)
        short = [row for row in plan.rows if self._steps.takes(row)]
        long = [row for row in plan.rows if not self._steps.takes(row)]
        if not short:
            return self._run_eager(long)
        # Apart, so that a row's sums do not depend on prompts that happen to be read meanwhile.
        self._steps.run(self._given(short))
        graphed = self._judge_graphed(self._steps, short, None if long else meanwhile)
        if not long:
            return graphed
        eager = self._run_eager(long)
        if self._model.tp.rank:
            return eager
        parts = {True: iter(graphed.outcomes), False: iter(eager.outcomes)}
        outcomes = [next(parts[self._steps.takes(row)]) for row in plan.rows if row.sample]
        return Verified(outcomes, eager.forward_ns)

    def queue(self, plan: StepPlan, begun: bool = False) -> bool:
        """Have the GPU begin what ``run`` is to be called for next; False, and nothing is done,
        where that is not one graph. ``begun``: it is the step that ``go_on`` has queued."""
        steps = self._steps
        if steps is None or not all(map(steps.takes, plan.rows)):
            return False
        if not self._take_up(plan):
            rows = self._given(plan.rows)
            if begun:
                steps.take_over(rows)
            else:
                steps.run(rows)
        self._queued = plan
        return True

    def go_on(self, plan: StepPlan, leave: Ahead) -> bool:
        """Queue the step after ``plan``, which is running, under ``leave`` and before its outcomes
        are known; whether that could be. No row may need more than its choices, or be sure to end.

        Where the rows decode alone, the step takes its tokens from the one before; one that ends
        after all leaves a position of KV behind that belongs to no sequence. A step of chains waits
        on the GPU for its input: the next plan's, if it can be that step, or ``release``.
        """
        steps = self._steps
        if steps is None or self._rule != "shared_noise" or leave.after != plan.step:
            return False
        if len(leave.rows) != len(plan.rows) or (leave.k and self._model.tp.size > 1):
            return False
        for row, own in zip(plan.rows, leave.rows, strict=True):
            if not row.sample or not self._slots[row.slot].plain or (row.chain and not leave.k):
                return False
            if own.left < row.chain + (3 if leave.k else 2):  # of a chain, one token at least
                return False
        more = [own.blocks for own in leave.rows]
        return steps.launch_ahead(more) if leave.k else steps.go_on(more)

    @property
    def gated(self) -> bool:
        """Whether a step waits on the GPU for its input, and everything else behind it."""
        return self._steps is not None and self._steps.gated

    def release(self) -> None:
        """Void a step that waits for its input, if there is one."""
        if self._steps is not None:
            self._steps.settle([])

    def close(self) -> None:
        """Give up what a tensor-parallel group must outlive. No plan may follow."""
        if self._steps is not None:
            self._steps.close()

    def begin_lease(self, plan: StepPlan) -> StepGraph:
        """Take up the plan that begins a lease; launches of the graph are its rounds.

        Raises RuntimeError if this target cannot run leases.
        """
        self._take_up(plan)
        if self._steps is None or plan.lease is None:
            raise RuntimeError("a lease for a target that cannot take one")
        return self._steps.begin_lease(self._given(plan.rows), plan.lease)

    def end_lease(self) -> None:
        """The rounds of a lease are over."""
        if self._steps is not None:
            self._steps.end_lease()

    def _take_up(self, plan: StepPlan) -> bool:
        """Take in what a plan says of the sequences; whether its step has begun.

        It has if one that waited for its input could be this one. Otherwise that is void. Every
        plan comes by here first, so that nothing is ever queued behind a step that waits.
        """
        for slot in plan.drop:
            self._slots.pop(slot, None)
        for start in plan.begin:
            self._slots[start.slot] = self._begin(start)
        for row in plan.rows:
            state = self._slots[row.slot]
            state.blocks.extend(row.blocks)
            if state.tracked is not None:
                state.tracked.feed(row.start, row.tokens, row.chain)
        self._mailed_ns = 0
        steps = self._steps
        if steps is None or not steps.gated:
            return False
        whole = plan.lease is None and all(map(steps.takes, plan.rows))
        begun = steps.settle(self._given(plan.rows) if whole else [])
        if begun:
            self._mailed_ns = time.monotonic_ns()
        return begun

    def _run_eager(self, rows: list[StepRow]) -> Verified:
        inputs = [
            BatchRow(self._slots[row.slot].blocks, row.start, row.tokens, self._first_logit(row))
            for row in rows
        ]
        batch = build_batch(inputs, self._block_size, self._model.backend.device)
        hidden = self._model.forward(batch, self._kv)
        forward_ns = time.monotonic_ns()
        sampled = [row for row in rows if row.sample]
        if not sampled:
            return Verified([], forward_ns)
        return Verified(self._judge.hidden(hidden, sampled), forward_ns)

    def _given(self, rows: Sequence[StepRow]) -> list[Row]:
        """Rows as graphs want them."""
        slots = self._slots
        return [(slots[row.slot].blocks, slots[row.slot].key, row) for row in rows]

    def _judge_graphed(
        self, steps: GraphedSteps, rows: list[StepRow], meanwhile: Callable[[], None] | None
    ) -> Verified:
        """Wait for the step of ``rows`` and judge it; rows with sampling of their own, or whose
        rule needs it, on the logits."""
        states = [self._slots[row.slot] for row in rows]
        if self._model.tp.rank:
            return Verified([], time.monotonic_ns())
        choices = steps.choices(meanwhile)
        forward_ns = time.monotonic_ns()
        chosen = self._rule == "shared_noise"
        apart = [i for i, s in enumerate(states) if not chosen or not s.plain]
        judged: Iterator[RowOutcome] = iter(())
        if apart:
            judged = iter(self._judge.logits(steps.logits(apart), [rows[i] for i in apart]))
        outcomes = []
        for i, row in enumerate(rows):
            if i in apart:
                outcomes.append(next(judged))
            else:
                chain = row.tokens[len(row.tokens) - row.chain :]
                outcomes.append(RowOutcome(*shared_noise.accept_chain(choices[i], chain)))
        return Verified(outcomes, forward_ns, self._mailed_ns)

    def _begin(self, start: SeqStart) -> SlotState:
        processors = start.key.processors
        tracked = None
        if processors is not None and self._model.tp.rank == 0:
            tracked = TrackedRules(processors, self._grammars, start.tokens)
        return SlotState(start.key, tracked, start.logprobs)

    @staticmethod
    def _first_logit(row: StepRow) -> int:
        return len(row.tokens) - 1 - row.chain if row.sample else len(row.tokens)
