"""What each round speculates: chains for the target, work for the draft.

Pure, like the scheduler. After a step, ``settle`` looks the outcome up in the speculation cache.
Before the next one, ``plan_draft`` says what the draft is to do: extend the trunk by the outcome,
speculate just in time for the rows that missed, and prepare for the outcomes of the coming
verification. In SD mode there is no cache: every row's chain is made just in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ipc.messages.draft import ChainReady, DraftLease, DraftPlan, DraftRow, DraftStart
from ipc.messages.sampling import NoiseKey
from ipc.messages.target import TOKEN_BYTES
from ipc.round_records import WAIT_BRANCHES, Record
from ssd_pipe.config import Mode, SpeculationSection, branch_budget
from ssd_pipe.engine import hashing
from ssd_pipe.engine.adaptive import Decision, EffortController
from ssd_pipe.engine.effort import OFF, Effort
from ssd_pipe.engine.ngram import NgramProposer
from ssd_pipe.engine.pacing import AcceptanceEstimator, StageTimes, best_chain_length, worth_waiting
from ssd_pipe.engine.partition import numbered, owner
from ssd_pipe.engine.partitioned_cache import PartitionedCache
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.scheduler import Emission, Row, Step

PROBE_EVERY = 8
"""Of the misses for which drafting seems too slow, the share that try it all the same."""
MAX_NEWS_BYTES = 256 << 10
"""Prompts and other news that a draft plan may carry if it is of several sequences."""


class Counters(msgspec.Struct):
    """Totals since start. ``steps_*``: target steps by how they speculated."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    backup_jit: int = 0
    backup_ngram: int = 0
    backup_none: int = 0
    steps_plain: int = 0
    steps_in_turn: int = 0
    steps_parallel: int = 0
    accepted_at: list[int] = []
    judged_at: list[int] = []
    hits_at: list[int] = []
    misses_at: list[int] = []


class LeasePolicy(NamedTuple):
    """How leased rounds wait and back up; see ``messages.Lease`` and ``messages.DraftLease``."""

    waits: int
    backup: int
    always: bool


@dataclass(slots=True, kw_only=True)
class RoundSeen:
    """What a round was like.

    Attributes:
        decision: how much it was to speculate.
        fed: tokens of the target's step.
        verify_seconds: time of that step.
        seconds: since the round before ended, 0 if the pipeline was idle.
        chains: length of each row's chain; empty if there were prompts among the rows.
    """

    decision: Decision
    fed: int
    verify_seconds: float
    seconds: float
    chains: list[int]


class RoundPlanner:
    """Chains and draft plans for one pipeline.

    Attributes:
        acceptance: running estimate, for pacing.
        drafting: there is a draft to speculate; while there is none, every row decodes alone.
        decision: how much the present round is to speculate, as the controller knows it.
        effort: the same.
        round: number of the latest draft round.
        times: running stage times in seconds ("verify" by tokens, "step", "glue").
    """

    def __init__(
        self, mode: Mode, spec: SpeculationSection, cache: PartitionedCache | None
    ) -> None:
        self._mode = mode
        self._spec = spec
        self._cache = cache
        self._workers = cache.workers if cache is not None else 1
        self._ngrams: dict[int, NgramProposer] = {}
        self._missed: set[int] = set()
        self._handovers = 0
        self._undrafted = 0
        self.drafting = True
        self._told: set[int] = set()  # slots of the rows the draft is told of in this round
        self.round = 0
        self.acceptance = AcceptanceEstimator(spec.k)
        self.efforts = EffortController(
            mode,
            spec.k,
            branch_budget(spec),
            self.acceptance,
            adaptive=spec.adaptive,
            disable_by_batch_size=spec.disable_by_batch_size,
            in_turn=spec.backup in ("auto", "jit"),
        )
        self.decision = self.efforts.decision
        self.effort = self.decision.effort
        self.times = StageTimes()
        width = spec.k + 1
        self.counters = Counters(
            accepted_at=[0] * width,
            judged_at=[0] * width,
            hits_at=[0] * width,
            misses_at=[0] * width,
        )

    def hash0(self, key: NoiseKey) -> int:
        """Prefix hash of a request before its first token."""
        return hashing.initial(key, self._spec.rule, self._spec.saguaro_c)

    def decide(self, load: int) -> Effort:
        """How much the coming round speculates, with so many sequences running."""
        made = self.efforts.decide(max(1, load)) if self.drafting else Decision(OFF)
        effort = self._decided(made)
        if effort == OFF:
            self.counters.steps_plain += 1
        elif effort.alone:
            self.counters.steps_in_turn += 1
        else:
            self.counters.steps_parallel += 1
        return effort

    def _decided(self, decision: Decision) -> Effort:
        self.decision, self.effort = decision, decision.effort
        return decision.effort

    # ------------------------------------------------------------ after a step

    def settle(self, emission: Emission, chain_length: int) -> None:
        """Look up a live request's outcome and take what the cache has of its chain.

        ``conclude`` is due once the wait for more of it, if any, is over.
        """
        request, k = emission.request, emission.outcome.accepted
        self._count(emission, chain_length)
        if not self.effort.branches or self._cache is None or not self.drafting:
            return
        if not emission.finish:
            hit = self._cache.lookup(request.slot, emission.prefix_hash, k, emission.outcome.token)
            if hit is not None:
                request.chain = hit.tokens
                request.entry = hit.entry

    def settle_leased(self, emission: Emission, chain_length: int, record: Record) -> None:
        """``settle`` with what the GPU found in the cache."""
        self._count(emission, chain_length)
        if not emission.finish and record.next:
            emission.request.chain = record.next
            emission.request.entry = record.entry

    def _count(self, emission: Emission, chain_length: int) -> None:
        request, k = emission.request, emission.outcome.accepted
        if chain_length:
            self.acceptance.observe(k, chain_length)
            self.counters.rounds += 1
            self.counters.drafted += chain_length
            self.counters.accepted += k
            self.counters.accepted_at[k] += 1
            for j in range(min(k + 1, chain_length)):
                self.counters.judged_at[j] += 1
        if emission.finish:
            self._ngrams.pop(request.rid, None)

    def conclude(self, emission: Emission) -> None:
        """Count a live request's outcome as a hit or a miss; a miss calls for a backup.

        An entry of which not one token came in time is a miss.
        """
        request, k = emission.request, emission.outcome.accepted
        if not self.effort.branches or emission.finish or not self.drafting:
            return
        counters = self.counters
        if request.chain:
            request.sampled_chain = True
            request.after_miss = False
            request.hits += 1
            counters.hits += 1
            counters.hits_at[k] += 1
        else:
            request.entry = -1
            request.after_miss = True
            request.misses += 1
            self._missed.add(request.rid)
            counters.misses += 1
            counters.misses_at[k] += 1

    @property
    def missed(self) -> bool:
        """Whether rows that missed are still without a chain."""
        return bool(self._missed)

    def worth_waiting(self, request: Request, batch: int) -> bool:
        """Whether a hit should wait for the draft's next depth (see ``pacing``).

        Always for its first token: the pass that makes it is under way, and any other chain could
        only be drafted after it.
        """
        if self._cache is None or request.entry < 0 or batch > 1:
            return False
        ready = len(request.chain)
        if ready >= self._cache.goal_of(request.slot, request.entry):
            return False
        step = self.times.time("step")
        if not ready or not step:
            return not ready
        return worth_waiting(self.acceptance.per_position(), ready, self._round_time, step)

    def _round_time(self, tokens: int) -> float:
        """Seconds of a round that verifies so many tokens, if the draft is to finish as well.

        A verification shorter than the draft's own round leaves the next one without branches.
        """
        drafting = self.times.time("glue") + self.effort.k * self.times.time("step")
        return max(self.times.verify(tokens), drafting)

    def cached_tokens(self, request: Request) -> Callable[[int], list[int]]:
        """By accepted length, the recovery tokens that would be a hit for ``request`` now."""
        cache, slot, prefix = self._cache, request.slot, request.prefix_hash

        def tokens(accepted: int) -> list[int]:
            return cache.recovery_tokens(slot, prefix, accepted) if cache is not None else []

        return tokens

    def announce_wait(self, waits: bool) -> None:
        """Let the draft know that someone sleeps until the next depth."""
        if self._cache is not None:
            self._cache.reader_waits = waits

    def deepen(self, request: Request) -> bool:
        """Take what has become ready of a hit's chain since; True if it grew."""
        if self._cache is None or request.entry < 0:
            return False
        ready = self._cache.tokens_of(request.slot, request.entry)
        if len(ready) <= len(request.chain):
            return False
        request.chain = ready
        return True

    def observe(self, seen: RoundSeen, emitted: int) -> None:
        """Learn from a round that is over, of which so many tokens came."""
        self.efforts.observe_step(seen.decision, seen.fed, seen.verify_seconds)
        if not seen.chains:
            return
        self.times.observe_verify(seen.fed // len(seen.chains), seen.verify_seconds)
        if seen.seconds:
            self.efforts.observe(seen.decision, seen.seconds, seen.chains, emitted)

    # ------------------------------------------------------------ before a step

    def prepare(self, step: Step, room: dict[int, int]) -> dict[int, int]:
        """Fit chains to the step; returns how many tokens to draft just in time, by slot.

        ``room`` maps slots to the longest useful chain of the row.
        """
        backups = {}
        decoding = step.decoding
        for row in decoding:
            limit = min(room[row.request.slot], self.effort.k)
            row.request.chain = row.request.chain[:limit]
        missed = [row for row in decoding if not row.request.chain]
        drafting = self.effort != OFF or self.decision.warming
        self._told = self._tellable(step) if drafting else set()
        for row in missed:
            request, limit = row.request, min(room[row.request.slot], self.effort.k)
            if not limit:
                continue
            length = self._jit_length(limit, len(missed), len(decoding))
            if length and request.slot in self._told:
                backups[request.slot] = length
                self.counters.backup_jit += 1
            elif self._spec.backup in ("auto", "ngram"):
                request.chain = list(self._ngram(request).propose(limit))
                self.counters.backup_ngram += bool(request.chain)
                self.counters.backup_none += not request.chain
            else:
                self.counters.backup_none += 1
        self._missed.clear()
        return backups

    def _jit_length(self, limit: int, missed: int, batch: int) -> int:
        """Tokens to draft while the target waits; 0 leaves the row to a free backup."""
        if self.effort.alone or self._spec.backup == "jit":
            return limit
        if self._spec.backup != "auto" or missed < batch:
            return 0  # rows that hit must not wait for rows that missed
        step = self.times.time("backup_step")
        if not step:
            return limit
        best = best_chain_length(
            self.acceptance.per_position(), self._round_time, step, step, self.effort.k
        )
        if not best:
            # One bad measurement would otherwise never be followed by another.
            self._undrafted += 1
            best = int(self._undrafted % PROBE_EVERY == 0)
        return min(limit, best)

    def _ngram(self, request: Request) -> NgramProposer:
        proposer = self._ngrams.get(request.rid)
        if proposer is None:
            proposer = NgramProposer(self._spec.ngram_max, self._spec.ngram_min)
            self._ngrams[request.rid] = proposer
        proposer.extend(request.tokens[len(proposer) :])
        return proposer

    def tells(self, slots: Iterable[int]) -> bool:
        """Whether the draft is told of all these rows in the step prepared last."""
        return self._told.issuperset(slots)

    def number_handovers(self, step: Step, backups: dict[int, int]) -> dict[int, int]:
        """By slot, the numbers under which the draft hands over the distributions that judge the
        chains of a step (rejection rule); rows without one are judged as point masses. The number
        also tells which draft worker: the one that owns the entry, and for backups the first."""
        numbers: dict[int, int] = {}
        if self._spec.rule != "rejection":
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

    def plan_draft(
        self, step: Step, backups: dict[int, int], handovers: dict[int, int]
    ) -> DraftPlan:
        """The draft's part of a step."""
        self.round += 1
        begin, rows = [], []
        warming = self.decision.warming
        for row in step.rows:
            request = row.request
            if request.slot not in self._told:
                continue
            if request.draft_length < 0:
                begin.append(self.begin(request))
            slot = request.slot
            needed = self.effort.branches or slot in backups or slot in handovers
            if row.sample and (needed or warming):
                rows.append(self._draft_row(row, backups.get(slot, 0), handovers.get(slot, 0)))
        return DraftPlan(
            round=self.round,
            rows=rows,
            begin=begin,
            drop=step.dropped,
            k=self.effort.k,
            branches=self.effort.branches,
        )

    @staticmethod
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

    @staticmethod
    def begin(request: Request) -> DraftStart:
        """What the draft needs to know of a request it has not heard of."""
        request.draft_length = len(request.tokens)
        return DraftStart(
            rid=request.rid, slot=request.slot, key=request.key, tokens=list(request.tokens)
        )

    def _draft_row(self, row: Row, backup: int, handover: int) -> DraftRow:
        request = row.request
        length = request.draft_length
        request.draft_length = len(request.tokens)
        return DraftRow(
            slot=request.slot,
            length=length,
            tokens=request.tokens[length:],
            chain=request.chain,
            fork=bool(self.effort.branches),
            prefix_hash=request.prefix_hash,
            entry=request.entry,
            backup=backup,
            after_miss=request.after_miss,
            handover=handover,
        )

    # ------------------------------------------------------------ leases

    def lease_policy(self, batch: int) -> LeasePolicy:
        """What a lease of so many rows is to do without asking.

        Branches that are late are always waited for: to draft a chain just in time, the draft
        would have to end the same pass first.
        """
        k = self._spec.k
        waits = WAIT_BRANCHES | 1
        step = self.times.time("step")
        if batch == 1 and step:
            chances = self.acceptance.per_position()
            depth = 1
            while depth < k and worth_waiting(chances, depth, self._round_time, step):
                waits |= 1 << depth
                depth += 1
        kind = self._spec.backup
        backup = self._jit_length(k, 1, 1) if kind in ("auto", "jit") else 0
        return LeasePolicy(waits, -1 if kind == "none" else backup, kind == "jit")

    def follow_backups(
        self, requests: Sequence[Request], chains: Sequence[list[int]], lease: DraftLease
    ) -> None:
        """Count what the draft gave the rows that missed in the last leased round."""
        missed = [
            (request, chain)
            for request, chain in zip(requests, chains, strict=True)
            if request.rid in self._missed
        ]
        jit = lease.drafts(len(missed), len(requests))
        for request, chain in missed:
            if request.room > 1:
                self.counters.backup_jit += jit
                self.counters.backup_ngram += bool(chain) and not jit
                self.counters.backup_none += not chain and not jit
        self._missed.clear()

    @staticmethod
    def take_backup(request: Request, answer: ChainReady) -> None:
        """A just-in-time chain has come."""
        request.chain = answer.tokens
        request.entry = -1
        request.sampled_chain = True

    def suspend(self, requests: Iterable[Request]) -> None:
        """Between steps: the draft is gone with all it knew of these running requests. Chains of
        its making are dropped, since nobody may be left to hand over what they were drawn from."""
        self.drafting = False
        self._decided(Decision(OFF))
        self._missed.clear()
        for request in requests:
            request.draft_length = -1
            request.after_miss = False
            request.drop_chain()

    def forget(self, request: Request) -> None:
        """A request left without an emission."""
        self._ngrams.pop(request.rid, None)
        self._missed.discard(request.rid)
