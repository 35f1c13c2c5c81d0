"""Chains out of the speculation cache: looked up by outcome, and grown while the draft goes on."""

from __future__ import annotations

from collections.abc import Callable

from ssd_pipe.engine.partitioned_cache import PartitionedCache
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.step import Emission


class CachedChains:
    """The scheduler's side of the cache; without one (``cache`` None) nothing is ever found."""

    def __init__(self, cache: PartitionedCache | None) -> None:
        self._cache = cache

    @property
    def workers(self) -> int:
        """Draft workers that write to the cache; 1 without one."""
        return self._cache.workers if self._cache is not None else 1

    def look_up(self, emission: Emission) -> None:
        """Give a live request what is ready of the chain for its outcome, if it is cached."""
        if self._cache is None:
            return
        request, outcome = emission.request, emission.outcome
        hit = self._cache.lookup(
            request.slot, emission.prefix_hash, outcome.accepted, outcome.token
        )
        if hit is not None:
            request.chain = hit.tokens
            request.entry = hit.entry

    def grows(self, request: Request) -> bool:
        """Whether more of a hit's chain is to come."""
        if self._cache is None or request.entry < 0:
            return False
        return len(request.chain) < self._cache.goal_of(request.slot, request.entry)

    def deepen(self, request: Request) -> bool:
        """Take what has become ready of a hit's chain since; True if it grew."""
        if self._cache is None or request.entry < 0:
            return False
        ready = self._cache.tokens_of(request.slot, request.entry)
        if len(ready) <= len(request.chain):
            return False
        request.chain = ready
        return True

    def announce_wait(self, waits: bool) -> None:
        """Let the draft know that someone sleeps until the next depth."""
        if self._cache is not None:
            self._cache.reader_waits = waits

    def recovery_tokens(self, request: Request) -> Callable[[int], list[int]]:
        """By accepted length, the recovery tokens that would be a hit for ``request`` now."""
        cache, slot, prefix = self._cache, request.slot, request.prefix_hash

        def tokens(accepted: int) -> list[int]:
            return cache.recovery_tokens(slot, prefix, accepted) if cache is not None else []

        return tokens
