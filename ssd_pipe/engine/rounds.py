"""What each round speculates: chains for the target, work for the draft.

Pure, like the scheduler. After a step, ``settle`` looks the outcome up in the speculation cache
(``cached_chains``). Before the next one, ``prepare`` finds chains for the rows that missed
(``backups``) and ``plan_draft`` says what the draft is to do (``draft_plans``): extend the trunk by
the outcome, speculate just in time for some of the rows that missed, and prepare for the outcomes
of the coming verification. How much, and what is worth waiting for, follows from the measured pace
of rounds (``round_pace``). In SD mode there is no cache: every row's chain is made just in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ipc.messages.draft import ChainReady, DraftLease, DraftPlan
from ipc.messages.sampling import NoiseKey
from ssd_pipe.config import Mode, SpeculationSection
from ssd_pipe.engine import hashing
from ssd_pipe.engine.adaptive import Decision
from ssd_pipe.engine.backups import Backups
from ssd_pipe.engine.cached_chains import CachedChains
from ssd_pipe.engine.counters import Counters
from ssd_pipe.engine.draft_plans import DraftPlans
from ssd_pipe.engine.effort import OFF, Effort
from ssd_pipe.engine.partitioned_cache import PartitionedCache
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.round_pace import RoundPace
from ssd_pipe.engine.step import Emission, Step


class LeasePolicy(NamedTuple):
    """How leased rounds wait and back up; see ``messages.Lease`` and ``messages.DraftLease``."""

    waits: int
    backup: int
    always: bool


class RoundPlanner:
    """Chains and draft plans for one pipeline.

    Attributes:
        drafting: there is a draft to speculate; while there is none, every row decodes alone.
        decision: how much the present round is to speculate, as the controller knows it.
        effort: the same.
        round: number of the latest draft round.
        counters: totals since start.
        pace: what rounds of this pipeline take and give.
        cached: chains out of the speculation cache.
    """

    def __init__(
        self, mode: Mode, spec: SpeculationSection, cache: PartitionedCache | None
    ) -> None:
        self._spec = spec
        self.drafting = True
        self.round = 0
        self.counters = Counters.of(spec.k)
        self.pace = RoundPace(mode, spec)
        self.cached = CachedChains(cache)
        self._backups = Backups(spec, self.pace, self.counters)
        self._plans = DraftPlans(spec.rule, self.cached.workers)
        self.decision = self.pace.efforts.decision
        self.effort = self.decision.effort
        self._foreseen: tuple[int, Decision] | None = None  # load, decision

    def hash0(self, key: NoiseKey) -> int:
        """Prefix hash of a request before its first token."""
        return hashing.initial(key, self._spec.rule, self._spec.saguaro_c)

    def decide(self, load: int) -> Effort:
        """How much the coming round speculates, with so many sequences running."""
        foreseen, self._foreseen = self._foreseen, None
        if not self.drafting:
            self._take(Decision(OFF))
        elif foreseen is not None and foreseen[0] == load:
            self._take(foreseen[1])
        else:
            self._take(self.pace.efforts.decide(max(1, load)))
        self.counters.step(self.effort)
        return self.effort

    def foresee(self, load: int) -> Effort:
        """What ``decide`` will say for the round after the present one if the load stays so."""
        if not self.drafting:
            return OFF
        decision = self.pace.efforts.decide(max(1, load))
        self._foreseen = (load, decision)
        return decision.effort

    def idle(self) -> None:
        """Nothing runs: what was foreseen is not of the round that comes after the pause."""
        self._foreseen = None

    def _take(self, decision: Decision) -> None:
        self.decision, self.effort = decision, decision.effort

    # ------------------------------------------------------------ after a step

    def settle(self, emission: Emission, chain_length: int) -> None:
        """Look up a live request's outcome and take what the cache has of its chain.

        ``conclude`` is due once the wait for more of it, if any, is over.
        """
        self._count(emission, chain_length)
        if self.effort.branches and self.drafting and not emission.finish:
            self.cached.look_up(emission)

    def settle_found(
        self, emission: Emission, chain_length: int, chain: list[int], entry: int
    ) -> None:
        """``settle`` with what the target has found in the cache by itself: a chain, empty for a
        miss, and its entry."""
        self._count(emission, chain_length)
        if not emission.finish and chain:
            emission.request.chain = chain
            emission.request.entry = entry

    def _count(self, emission: Emission, chain_length: int) -> None:
        if chain_length:
            self.pace.acceptance.observe(emission.outcome.accepted, chain_length)
            self.counters.verified(emission.outcome.accepted, chain_length)
        if emission.finish:
            self._backups.forget(emission.request)

    def worth_waiting(self, request: Request, batch: int) -> bool:
        """Whether a hit should wait for the draft's next depth; in a batch no row makes others
        wait."""
        if batch > 1 or not self.cached.grows(request):
            return False
        return self.pace.worth_waiting(len(request.chain), self.effort.k)

    def conclude(self, emission: Emission) -> None:
        """Count a live request's outcome as a hit or a miss; a miss calls for a backup.

        An entry of which not one token came in time is a miss.
        """
        if not self.effort.branches or emission.finish or not self.drafting:
            return
        request = emission.request
        hit = bool(request.chain)
        self.counters.looked_up(emission.outcome.accepted, hit)
        request.after_miss = not hit
        if hit:
            request.sampled_chain = True
            request.hits += 1
        else:
            request.entry = -1
            request.misses += 1
            self._backups.miss(request)

    # ------------------------------------------------------------ before a step

    def prepare(self, step: Step, room: dict[int, int]) -> dict[int, int]:
        """Fit chains to the step; returns how many tokens to draft just in time, by slot.

        ``room`` maps slots to the longest useful chain of the row.
        """
        limits = {slot: min(longest, self.effort.k) for slot, longest in room.items()}
        decoding = [row.request for row in step.decoding]
        for request in decoding:
            request.chain = request.chain[: limits[request.slot]]
        self._plans.begin_step(step, self.effort != OFF or self.decision.warming)
        return self._backups.choose(decoding, limits, self.effort, self._plans.told)

    def tells(self, slots: Iterable[int]) -> bool:
        """Whether the draft is told of all these rows in the step prepared last."""
        return self._plans.told.issuperset(slots)

    def number_handovers(self, step: Step, backups: dict[int, int]) -> dict[int, int]:
        """By slot, under which numbers distributions of a step's chains are handed over (see
        ``DraftPlans``)."""
        return self._plans.number_handovers(step, backups)

    def plan_draft(
        self, step: Step, backups: dict[int, int], handovers: dict[int, int]
    ) -> DraftPlan:
        """The draft's part of a step; begins a round."""
        self.round += 1
        warming = self.decision.warming
        return self._plans.plan(self.round, step, self.effort, warming, backups, handovers)

    @staticmethod
    def take_backup(request: Request, answer: ChainReady) -> None:
        """A just-in-time chain has come."""
        request.chain = answer.tokens
        request.entry = -1
        request.sampled_chain = True

    # ------------------------------------------------------------ leases

    def lease_policy(self, batch: int) -> LeasePolicy:
        """What a lease of so many rows is to do without asking."""
        return LeasePolicy(
            self.pace.lease_waits(self.effort.k, batch),
            self._backups.under_lease(self.effort),
            self._spec.backup == "jit",
        )

    @property
    def missed(self) -> bool:
        """Whether rows that missed are still without a chain."""
        return self._backups.due

    def follow_backups(
        self, requests: Sequence[Request], chains: Sequence[list[int]], lease: DraftLease
    ) -> None:
        """Count what the draft gave the rows that missed in the last leased round."""
        self._backups.follow(requests, chains, lease)

    # ------------------------------------------------------------ partings

    def suspend(self, requests: Iterable[Request]) -> None:
        """Between steps: the draft is gone with all it knew of these running requests. Chains of
        its making are dropped, since nobody may be left to hand over what they were drawn from."""
        self.drafting = False
        self._take(Decision(OFF))
        self._backups.cancel()
        for request in requests:
            request.draft_length = -1
            request.after_miss = False
            request.drop_chain()

    def forget(self, request: Request) -> None:
        """A request left without an emission."""
        self._backups.forget(request)
