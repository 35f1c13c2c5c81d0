"""Leased rounds on the draft's side: plans made from what the target's GPU records.

Without a lease the scheduler says after every round what came out and what to do next. Under one,
the draft reads the same off the records: the outcome extends the trunk, the cached chain (or, after
a miss, the one it drafts or looks up itself) is what the target verifies now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ipc.messages.draft import DraftLease, DraftPlan, DraftRow
from ipc.round_records import DRAFTED, Record, RoundRecords
from ssd_pipe.config import SpeculationSection
from ssd_pipe.engine.hashing import extend_all
from ssd_pipe.engine.ngram import NgramProposer


@dataclass(slots=True)
class _Row:
    """A leased row: its place in the records, committed tokens, and their hash."""

    place: int
    slot: int
    length: int
    prefix_hash: int


class RecordPlans:
    """Follows one lease after another.

    Args:
        tokens_of: committed tokens of a slot, as far as the plans handed out so far were applied.
    """

    def __init__(
        self,
        records: RoundRecords,
        spec: SpeculationSection,
        tokens_of: Callable[[int], list[int]],
    ) -> None:
        self._records = records
        self._spec = spec
        self._tokens_of = tokens_of
        self._lease = DraftLease(0, 0, 0)
        self._rows: list[_Row] = []
        self._ngrams: dict[int, NgramProposer] = {}
        self._number = 0
        self._round = 0

    def begin(self, plan: DraftPlan) -> None:
        """Follow the lease that ``plan`` brings; it is applied before ``take`` is called."""
        if plan.lease is None:
            raise ValueError("a plan without a lease")
        self._lease, self._number, self._round = plan.lease, plan.lease.first, plan.round
        self._rows = [
            _Row(place, row.slot, row.length + len(row.tokens), row.prefix_hash)
            for place, row in enumerate(plan.rows)
        ]
        self._ngrams.clear()
        self._records.read(DRAFTED, self._number - 1)

    @property
    def over(self) -> bool:
        """Whether every round of the lease has been read."""
        return self._number >= self._lease.first + self._lease.rounds

    @property
    def number(self) -> int:
        """The round to be read next."""
        return self._number

    def end(self) -> None:
        """The lease has ended early."""
        self._lease = DraftLease(self._number, 0, 0)

    def take(self) -> DraftPlan | None:
        """The plan that the next round's records make, None if they are not there yet.

        Chains that need no drafting are answered here. Apply it before the next call.
        """
        if self.over:
            return None
        found = self._records.round(self._number, len(self._rows))
        if found is None:
            return None
        number = self._number
        self._number += 1
        self._round += 1
        self._records.read(DRAFTED, number)
        live = [(row, rec) for row, rec in zip(self._rows, found, strict=True) if not rec.finished]
        missed = sum(not record.next for _, record in live)
        drafts = self._lease.drafts(missed, len(live))
        if not live:
            self.end()
        rows = [self._plan_row(row, record, number, drafts) for row, record in live]
        return DraftPlan(self._round, rows, number=number + 1)

    def _plan_row(self, row: _Row, record: Record, number: int, drafts: bool) -> DraftRow:
        tokens = [*record.chain[: record.accepted], record.token]
        length = row.length
        row.length += len(tokens)
        row.prefix_hash = extend_all(row.prefix_hash, tokens)
        chain, backup = record.next[: record.room], 0
        if not record.next and not self.over:
            if drafts:
                backup = min(record.room, self._lease.backup)
            elif record.room:
                chain = self._look_up(row.slot, tokens, record.room)
                self._records.answer(row.slot, number, chain)
        return DraftRow(
            slot=row.slot,
            length=length,
            tokens=tokens,
            chain=chain,
            fork=not self.over,
            prefix_hash=row.prefix_hash,
            entry=record.entry,
            backup=backup,
            after_miss=not record.next,
            place=row.place,
        )

    def _look_up(self, slot: int, tokens: list[int], limit: int) -> list[int]:
        """What followed the same n-gram before, if that is wanted."""
        if self._lease.backup < 0:
            return []
        proposer = self._ngrams.get(slot)
        if proposer is None:
            proposer = NgramProposer(self._spec.ngram_max, self._spec.ngram_min)
            self._ngrams[slot] = proposer
        proposer.extend([*self._tokens_of(slot), *tokens][len(proposer) :])
        return list(proposer.propose(limit))
