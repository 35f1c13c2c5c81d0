"""What the draft is told of a step: news of its sequences, their chains, and what to make."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ipc.messages.draft import DraftPlan, DraftRow, DraftStart
from ipc.messages.target import TOKEN_BYTES
from ssd_pipe.config import Rule
from ssd_pipe.engine.effort import Effort
from ssd_pipe.engine.partition import numbered, owner
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.step import Row, Step

MAX_NEWS_BYTES = 256 << 10
"""Prompts and other news that a draft plan may carry if it is of several sequences."""


class DraftPlans:
    """Writes the plans of one pipeline.

    Args:
        rule: under "rejection" the draft hands over what it drew its chains from.
        workers: draft workers.

    Attributes:
        told: slots of the rows that the draft is told of in the present step.
    """

    def __init__(self, rule: Rule, workers: int) -> None:
        self._rule = rule
        self._workers = workers
        self._handovers = 0
        self.told: set[int] = set()

    def begin_step(self, step: Step, drafting: bool) -> None:
        """Choose whom to tell of; nobody if there is to be no ``drafting``."""
        self.told = _tellable(step) if drafting else set()

    def number_handovers(self, step: Step, backups: Collection[int]) -> dict[int, int]:
        """By slot, the numbers under which the draft hands over the distributions that judge the
        chains of a step (rejection rule); rows without one are judged as point masses. The number
        also tells which draft worker: the one that owns the entry, and for ``backups`` (slots) the
        first."""
        numbers: dict[int, int] = {}
        if self._rule != "rejection":
            return numbers
        for row in step.sampled:
            request = row.request
            drawn = request.slot in backups or (request.sampled_chain and request.chain)
            if drawn and request.key.temperature > 0:
                self._handovers += 1
                maker = 0
                if request.slot not in backups:
                    maker = owner(request.slot, request.entry, self._workers)
                numbers[request.slot] = numbered(self._handovers, maker, self._workers)
        return numbers

    def plan(
        self,
        number: int,
        step: Step,
        effort: Effort,
        warming: bool,
        backups: Mapping[int, int],
        handovers: Mapping[int, int],
    ) -> DraftPlan:
        """The draft's part of a step; its requests count as told of.

        Args:
            number: of the round.
            effort: how much it speculates.
            warming: the draft is to read along although the round does not need it.
            backups: tokens to draft just in time, by slot.
            handovers: hand-over numbers by slot.
        """
        begin, rows = [], []
        for row in step.rows:
            request, slot = row.request, row.request.slot
            if slot not in self.told:
                continue
            if request.draft_length < 0:
                begin.append(draft_start(request))
            needed = effort.branches or slot in backups or slot in handovers
            if row.sample and (needed or warming):
                backup, handover = backups.get(slot, 0), handovers.get(slot, 0)
                rows.append(_draft_row(row, bool(effort.branches), backup, handover))
        return DraftPlan(
            round=number,
            rows=rows,
            begin=begin,
            drop=step.dropped,
            k=effort.k,
            branches=effort.branches,
        )


def draft_start(request: Request) -> DraftStart:
    """What the draft needs to know of a request it has not heard of; it counts as told of."""
    request.draft_length = len(request.tokens)
    return DraftStart(
        rid=request.rid, slot=request.slot, key=request.key, tokens=list(request.tokens)
    )


def _draft_row(row: Row, fork: bool, backup: int, handover: int) -> DraftRow:
    request = row.request
    length = request.draft_length
    request.draft_length = len(request.tokens)
    return DraftRow(
        slot=request.slot,
        length=length,
        tokens=request.tokens[length:],
        chain=request.chain,
        fork=fork,
        prefix_hash=request.prefix_hash,
        entry=request.entry,
        backup=backup,
        after_miss=request.after_miss,
        handover=handover,
    )


def _tellable(step: Step) -> set[int]:
    """Slots of the rows whose news fit one draft plan; the first ones do, others come later."""
    slots: set[int] = set()
    room = MAX_NEWS_BYTES
    for row in step.rows:
        request = row.request
        size = TOKEN_BYTES * (len(request.tokens) - max(0, request.draft_length))
        if request.draft_length < 0 and request.key.processors is not None:
            size += request.key.processors.wire_bytes
        if slots and size > room and not request.chain:
            continue  # a row with a chain may have distributions to be handed over
        room -= size
        slots.add(request.slot)
    return slots
