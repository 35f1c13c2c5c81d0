"""One speculation cache written by several draft workers, each its own part of every slot.

The buffer is the workers' caches one after another, each a ``SpeculationCache`` of its share of the
entries with one writer and a sequence counter of its own; so no worker waits for another, and one
that is late or dead costs its own branches only. A lookup looks through all parts. Entries are
numbered across parts by ``partition``. Workers that disagree on the ranking (their GPUs rounded
differently, or one skipped a round and calibrates otherwise) may hold an outcome twice or not at
all, which costs a hit and nothing else: entries are found by what they are, not by where they are.
"""

from __future__ import annotations

from typing import Any

from ssd_pipe.engine import speculation_cache
from ssd_pipe.engine.partition import Share, owner, part_entries
from ssd_pipe.engine.speculation_cache import Hit, SpeculationCache


def size_bytes(slots: int, entries: int, k: int, workers: int) -> int:
    """Bytes of the buffer of a cache of ``entries`` branches a slot in all."""
    return workers * speculation_cache.size_bytes(slots, part_entries(entries, workers), k)


def make_part(
    buffer: Any, slots: int, entries: int, k: int, share: Share, vocab_size: int = 2**31 - 1
) -> SpeculationCache:
    """One worker's part, cleared, to write to; the other parts are left alone.

    Raises ConfigError and ResourceError as SpeculationCache does.
    """
    return _part(buffer, slots, entries, k, share, True, vocab_size)


class PartitionedCache:
    """The reading side. Every part has to have been made.

    Args:
        buffer: of at least ``size_bytes``, writable, 8-byte aligned.
        slots: sequences.
        entries: branches per sequence, of all workers together.
        k: draft tokens per branch.
        workers: parts.
        vocab_size: see SpeculationCache.

    Raises ConfigError and ResourceError as SpeculationCache does.
    """

    def __init__(
        self,
        buffer: Any,
        slots: int,
        entries: int,
        k: int,
        workers: int = 1,
        vocab_size: int = 2**31 - 1,
    ) -> None:
        self._shares = [Share(worker, workers) for worker in range(workers)]
        self._parts = [
            _part(buffer, slots, entries, k, share, False, vocab_size) for share in self._shares
        ]
        self.workers = workers

    def close(self) -> None:
        """Drop every view of the buffer; no call may follow."""
        for part in self._parts:
            part.close()

    @property
    def reader_waits(self) -> bool:
        """See SpeculationCache; every worker is told."""
        return any(part.reader_waits for part in self._parts)

    @reader_waits.setter
    def reader_waits(self, waits: bool) -> None:
        for part in self._parts:
            part.reader_waits = waits

    def lookup(self, slot: int, prefix_hash: int, accepted: int, token: int) -> Hit | None:
        """The branch of an outcome, whoever has it, with what is ready of it; None is a miss."""
        for part, share in zip(self._parts, self._shares, strict=True):
            hit = part.lookup(slot, prefix_hash, accepted, token)
            if hit is not None:
                return hit._replace(entry=share.entry(slot, hit.entry))
        return None

    def announced(self, slot: int, prefix_hash: int) -> bool:
        """Whether every worker has said which outcomes after this prefix it has branches for."""
        return all(part.announced(slot, prefix_hash) for part in self._parts)

    def recovery_tokens(self, slot: int, prefix_hash: int, accepted: int) -> list[int]:
        """Recovery tokens that ``lookup`` would find for an accepted length just now."""
        return [
            token
            for part in self._parts
            for token in part.recovery_tokens(slot, prefix_hash, accepted)
        ]

    def depth_of(self, slot: int, entry: int) -> int:
        """Tokens ready of an entry now; see SpeculationCache."""
        part, place = self._at(slot, entry)
        return part.depth_of(slot, place)

    def goal_of(self, slot: int, entry: int) -> int:
        """Depth an entry will reach if nothing stops its worker."""
        part, place = self._at(slot, entry)
        return part.goal_of(slot, place)

    def tokens_of(self, slot: int, entry: int) -> list[int]:
        """Tokens ready of an entry now; see SpeculationCache."""
        part, place = self._at(slot, entry)
        return part.tokens_of(slot, place)

    def _at(self, slot: int, entry: int) -> tuple[SpeculationCache, int]:
        worker = owner(slot, entry, self.workers)
        return self._parts[worker], self._shares[worker].place(entry)


def _part(
    buffer: Any, slots: int, entries: int, k: int, share: Share, create: bool, vocab_size: int
) -> SpeculationCache:
    own = part_entries(entries, share.workers)
    size = speculation_cache.size_bytes(slots, own, k)
    raw = memoryview(buffer).cast("B")[share.worker * size : (share.worker + 1) * size]
    return SpeculationCache(raw, slots, own, k, create, vocab_size)
