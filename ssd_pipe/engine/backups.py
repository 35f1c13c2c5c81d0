"""What rows without a chain get instead: one drafted just in time, one of n-grams, or none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ipc.messages.draft import DraftLease
from ssd_pipe.config import SpeculationSection
from ssd_pipe.engine.counters import Counters
from ssd_pipe.engine.effort import Effort
from ssd_pipe.engine.ngram import NgramProposer
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.round_pace import RoundPace

PROBE_EVERY = 8
"""Of the misses for which drafting seems too slow, the share that try it all the same."""


class Backups:
    """Chooses each backup by ``speculation.backup``; "auto" drafts one where that pays."""

    def __init__(self, spec: SpeculationSection, pace: RoundPace, counters: Counters) -> None:
        self._spec = spec
        self._pace = pace
        self._counters = counters
        self._ngrams: dict[int, NgramProposer] = {}
        self._missed: set[int] = set()
        self._undrafted = 0

    # ------------------------------------------------------------ misses

    def miss(self, request: Request) -> None:
        """The request's outcome was not cached."""
        self._missed.add(request.rid)

    @property
    def due(self) -> bool:
        """Whether rows that missed are still without a chain."""
        return bool(self._missed)

    def cancel(self) -> None:
        """No row that missed gets a backup."""
        self._missed.clear()

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._ngrams.pop(request.rid, None)
        self._missed.discard(request.rid)

    # ------------------------------------------------------------ choice

    def choose(
        self,
        decoding: Sequence[Request],
        limits: Mapping[int, int],
        effort: Effort,
        told: Collection[int],
    ) -> dict[int, int]:
        """Back up the rows of a step that have no chain; returns how many tokens to draft just in
        time, by slot.

        Args:
            decoding: the step's decoding rows.
            limits: longest useful chain by slot, none longer than the effort's.
            effort: how much the round speculates.
            told: slots that the draft is told of.
        """
        drafted = {}
        missed = [request for request in decoding if not request.chain]
        for request in missed:
            limit = limits[request.slot]
            if not limit:
                continue
            length = self._jit_length(effort, limit, len(missed), len(decoding))
            jit = length > 0 and request.slot in told
            if jit:
                drafted[request.slot] = length
            elif self._spec.backup in ("auto", "ngram"):
                request.chain = list(self._ngram(request).propose(limit))
            self._counters.backed_up(jit, request.chain)
        self._missed.clear()
        return drafted

    def under_lease(self, effort: Effort) -> int:
        """Tokens that a leased round drafts for a miss, 0 = n-grams, -1 = nothing."""
        if self._spec.backup not in ("auto", "jit"):
            return -1 if self._spec.backup == "none" else 0
        return self._jit_length(effort, effort.k, 1, 1)

    def follow(
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
                self._counters.backed_up(jit, chain)
        self._missed.clear()

    def _jit_length(self, effort: Effort, limit: int, missed: int, batch: int) -> int:
        """Tokens to draft while the target waits; 0 leaves the row to a free backup."""
        if effort.alone or self._spec.backup == "jit":
            return limit
        if self._spec.backup != "auto" or missed < batch:
            return 0  # rows that hit must not wait for rows that missed
        best = self._pace.jit_length(effort.k)
        if best is None:
            return limit
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
