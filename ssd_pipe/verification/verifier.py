"""Runs target steps: one forward pass over every row's tokens, then the acceptance rule.

Every tensor-parallel rank runs the same plans; rank 0 has the logits and judges.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ipc.messages import RowOutcome, StepPlan, StepRow
from models.kv_cache import KVCache
from models.sequence_batch import BatchRow, build_batch
from models.transformer import Transformer
from ssd_pipe.config import Rule
from ssd_pipe.params import NoiseKey
from ssd_pipe.sampling import rejection, shared_noise

Proposals = Callable[[int, int, int], torch.Tensor | None]
"""(slot, hand-over number, chain length) -> draft distributions [K, V] float32, None if lost."""


@dataclass(slots=True)
class SlotState:
    """What the target keeps of one running sequence."""

    key: NoiseKey
    blocks: array[int] = field(default_factory=lambda: array("i"))


@dataclass(slots=True)
class Verified:
    """Outcomes of the sampled rows, in the plan's order, and when the layers were through (ns);
    the head is part of the choice of tokens where that is fused."""

    outcomes: list[RowOutcome]
    forward_ns: int


class Verifier:
    """The target model, its KV, and the slots of the running sequences."""

    def __init__(
        self, model: Transformer, kv: KVCache, block_size: int, rule: Rule, proposals: Proposals
    ) -> None:
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._rule = rule
        self._proposals = proposals
        self._slots: dict[int, SlotState] = {}

    def run(self, plan: StepPlan) -> Verified:
        """Execute one plan. Returns no outcomes on ranks other than 0."""
        for slot in plan.drop:
            self._slots.pop(slot, None)
        for start in plan.begin:
            self._slots[start.slot] = SlotState(start.key)
        for row in plan.rows:
            self._slots[row.slot].blocks.extend(row.blocks)
        inputs = [
            BatchRow(self._slots[row.slot].blocks, row.start, row.tokens, self._first_logit(row))
            for row in plan.rows
        ]
        batch = build_batch(inputs, self._block_size, self._model.backend.device)
        hidden = self._model.forward(batch, self._kv)
        forward_ns = time.monotonic_ns()
        sampled = [row for row in plan.rows if row.sample]
        if not sampled:
            return Verified([], forward_ns)
        outcomes = self._judge(hidden, sampled)
        return Verified([RowOutcome(k, token) for k, token in outcomes], forward_ns)

    @staticmethod
    def _first_logit(row: StepRow) -> int:
        return len(row.tokens) - 1 - row.chain if row.sample else len(row.tokens)

    def _judge(self, hidden: torch.Tensor, rows: list[StepRow]) -> list[tuple[int, int]]:
        """hidden [sum(chain + 1), H], rows in order; empty on ranks other than 0."""
        model = self._model
        chains = [row.tokens[len(row.tokens) - row.chain :] for row in rows]
        keys = [self._slots[row.slot].key for row in rows]
        starts = [row.start + len(row.tokens) - row.chain for row in rows]
        if self._rule == "shared_noise" and model.tp.size == 1:
            return shared_noise.judge_from(model, hidden, chains, keys, starts)
        logits = model.logits(hidden)
        if logits is None:
            return []
        if self._rule == "shared_noise":
            return shared_noise.judge(logits, chains, keys, starts, model.backend.sampling)
        q: list[torch.Tensor | None] = []
        lost = []
        for row in rows:
            handed = self._proposals(row.slot, row.handover, row.chain) if row.handover else None
            q.append(handed)
            lost.append(bool(row.handover) and handed is None)
        return rejection.judge(logits, chains, keys, starts, q, lost)
