"""The speculation cache: outcome (prefix hash, accepted k, token t*) -> next draft tokens.

One flat buffer, usually shared memory. The draft process writes it and the scheduler reads it at
the same time, without locks or messages: a query costs microseconds. There is one writer.

Each slot (one running sequence) holds ``entries`` branch rows, all decoded together. A row is
content-addressed; what a lookup returns is only ever a proposal, and its token ids are
range-checked, so that a stale row can cost speed but never correctness.
"""

# Memory order. Keys are guarded by a sequence counter that is odd while they change (a seqlock):
# the reader takes nothing unless it sees the same even value before and after. Tokens of a depth
# are stored before the depth that announces them, and never change until the keys do. Both need
# stores to become visible in program order and loads not to pass loads. x86 (TSO) promises that;
# the compiler cannot reorder either, since every access below is a separate call into numpy or
# memoryview. Each counter, depth and token is a naturally aligned word and is copied as such. On a
# weakly ordered CPU (ARM) fences would be needed between the steps marked (1), (2), (3).

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssd_pipe.errors import ConfigError, ResourceError

_MAGIC = 0x5353445043414331
_HEADER_BYTES = 64
_WAITS = 4  # header word of ``reader_waits``; before it stand the label and the shape
_RETRIES = 200
_NO_OUTCOME = -1


class Hit(NamedTuple):
    """A cached outcome.

    Attributes:
        entry: row in the slot, for ``depth_of``.
        depth: draft tokens ready, 0..k.
        tokens: those tokens.
    """

    entry: int
    depth: int
    tokens: list[int]


def _slot_dtype(entries: int, k: int) -> np.dtype[np.void]:
    # One array per field, not one struct per row: a lookup compares all rows in one operation, and
    # publishing a depth is one contiguous store per field.
    fields = np.dtype(
        [
            ("sequence", "<u8", (1,)),  # an array of one, for a view of it can be had
            ("hash", "<u8", (entries,)),
            ("outcome", "<i8", (entries,)),  # accepted << 32 | token
            ("depth", "<i4", (entries,)),
            ("goal", "<i4", (entries,)),
            ("tokens", "<i4", (k, entries)),
        ]
    )
    line = 64
    padding = -fields.itemsize % line
    return np.dtype([*((n, fields[n]) for n in fields.names or ()), ("pad", "u1", (padding,))])


def size_bytes(slots: int, entries: int, k: int) -> int:
    """Bytes of the buffer that SpeculationCache needs."""
    return _HEADER_BYTES + slots * _slot_dtype(entries, k).itemsize


class SpeculationCache:
    """View of a speculation cache in ``buffer``; one process writes, any number read.

    Attributes:
        vocab_size: a lookup whose tokens are not all in [0, vocab_size) is a miss.
    """

    def __init__(
        self,
        buffer: Any,
        slots: int,
        entries: int,
        k: int,
        create: bool,
        vocab_size: int = 2**31 - 1,
    ) -> None:
        """
        Args:
            buffer: writable, C-contiguous, at least ``size_bytes`` long, 8-byte aligned.
            slots: sequences.
            entries: branches per sequence.
            k: draft tokens per branch.
            create: clear and label the buffer; False checks the label.

        Raises:
            ConfigError: a count below 1.
            ResourceError: the buffer is too small, or holds a cache of another shape.
        """
        for name, value in (("slots", slots), ("entries", entries), ("k", k)):
            if value < 1:
                raise ConfigError(name, f"must be at least 1, got {value}")
        self.slots, self.entries, self.k = slots, entries, k
        self.vocab_size = vocab_size
        raw = memoryview(buffer).cast("B")
        need = size_bytes(slots, entries, k)
        if raw.nbytes < need:
            raise ResourceError(f"speculation cache: {need} bytes needed, buffer has {raw.nbytes}")
        header = raw[:_HEADER_BYTES].cast("Q")
        shape = [slots, entries, k]
        body = np.frombuffer(raw, _slot_dtype(entries, k), slots, _HEADER_BYTES)
        if create:
            raw[:need] = bytes(need)
            body["outcome"] = _NO_OUTCOME
            for i, value in enumerate(shape, 1):
                header[i] = value
            header[0] = _MAGIC
        elif header[0] != _MAGIC or list(header[1:4]) != shape:
            raise ResourceError(
                f"speculation cache: buffer does not hold one of slots, entries, k = {shape}"
            )
        self._header = header
        self._sequence = [memoryview(s["sequence"]) for s in body]
        self._hash = [s["hash"] for s in body]
        self._outcome = [s["outcome"] for s in body]
        self._depth = [s["depth"] for s in body]
        self._goal = [s["goal"] for s in body]
        self._tokens = [s["tokens"] for s in body]
        # The reader goes through memoryviews: for a few dozen words numpy takes several times as
        # long, and a query is on the way from one verification to the next.
        self._hash_words = [memoryview(a) for a in self._hash]
        self._outcome_words = [memoryview(a) for a in self._outcome]
        self._token_words = [memoryview(a.reshape(-1)) for a in self._tokens]
        self._count = [0] * slots

    def close(self) -> None:
        """Drop every view of the buffer, so that its owner can close it; no call may follow."""
        for views in (self._sequence, self._hash_words, self._outcome_words, self._token_words):
            views.clear()
        for arrays in (self._hash, self._outcome, self._depth, self._goal, self._tokens):
            arrays.clear()
        self._header.release()

    @property
    def reader_waits(self) -> bool:
        """The reader sleeps until more of a chain is ready: tell it of the next depth.

        The flag and a depth are looked at in opposite order by the two sides, and without a fence
        each can miss the other; so the reader must not sleep on it without a timeout.
        """
        return bool(self._header[_WAITS])

    @reader_waits.setter
    def reader_waits(self, waits: bool) -> None:
        self._header[_WAITS] = int(waits)

    # ------------------------------------------------------------------ writer

    def begin_round(
        self,
        slot: int,
        keys: Sequence[tuple[int, int, int]],
        goals: Sequence[int] | NDArray[np.integer] | None = None,
    ) -> None:
        """Replace a slot's branches by new ones, with no token ready yet.

        Args:
            keys: (prefix hash, accepted k, token t*) of each branch, at most ``entries``.
            goals: how deep each branch will get if nothing stops the draft, k by default.
        """
        n = len(keys)
        if n > self.entries:
            raise ConfigError("keys", f"at most {self.entries} branches, got {n}")
        hashes = np.array([key[0] for key in keys], dtype=np.uint64)
        outcomes = [accepted << 32 | token for _, accepted, token in keys]
        self._turn(slot)  # (1)
        self._outcome[slot][n:] = _NO_OUTCOME
        self._depth[slot][:] = 0
        self._goal[slot][:n] = self.k if goals is None else goals
        self._hash[slot][:n] = hashes
        self._outcome[slot][:n] = outcomes
        self._turn(slot)  # (2)
        self._count[slot] = n

    def publish_depth(
        self, slot: int, depth: int, tokens: Sequence[int] | NDArray[np.integer]
    ) -> None:
        """Make the ``depth``-th token (from 1) of the round's leading branches visible.

        Args:
            tokens: int [n], for the first n keys of ``begin_round``, in their order; branches
                beyond n stay as deep as they are.
        """
        if not 1 <= depth <= self.k:
            raise ConfigError("depth", f"must be 1..{self.k}, got {depth}")
        n = len(tokens)
        if n > self._count[slot]:
            raise ConfigError("tokens", f"at most {self._count[slot]} branches, got {n}")
        self._tokens[slot][depth - 1, :n] = tokens
        self._depth[slot][:n] = depth  # (3)

    def pass_over(self, slot: int, prefix_hash: int) -> None:
        """Announce that no outcome after this prefix has a branch."""
        self._forget(slot, prefix_hash)

    def clear(self, slot: int) -> None:
        """Forget a slot's branches (its sequence left)."""
        self._forget(slot, 0)

    def _forget(self, slot: int, prefix_hash: int) -> None:
        self._turn(slot)
        self._hash[slot][0] = prefix_hash
        self._outcome[slot][:] = _NO_OUTCOME
        self._depth[slot][:] = 0
        self._turn(slot)
        self._count[slot] = 0

    def _turn(self, slot: int) -> None:
        """Advance the sequence counter: odd before an update, even after it."""
        self._sequence[slot][0] += 1

    # ------------------------------------------------------------------ reader

    def lookup(self, slot: int, prefix_hash: int, accepted: int, token: int) -> Hit | None:
        """The row of an outcome, with what is ready of it by now; None is a miss.

        Also None if the writer stays inside an update for all retries (it was descheduled or died).
        """
        sequence = self._sequence[slot]
        outcome = accepted << 32 | token
        for attempt in range(_RETRIES):
            before = sequence[0]
            if not before & 1:
                hit = self._find(slot, prefix_hash, outcome)
                if sequence[0] == before:
                    return hit
            if attempt > 2:
                os.sched_yield()
        return None

    def announced(self, slot: int, prefix_hash: int) -> bool:
        """Whether the writer has said which outcomes after this prefix have branches."""
        return self._hash_words[slot][0] == prefix_hash and not self._sequence[slot][0] & 1

    def recovery_tokens(self, slot: int, prefix_hash: int, accepted: int) -> list[int]:
        """Recovery tokens that ``lookup`` would find for an accepted length just now."""
        outcomes = self._outcome_words[slot].tolist()
        return [
            outcome & 0xFFFFFFFF
            for outcome, found in zip(outcomes, self._hash_words[slot].tolist(), strict=True)
            if outcome >= 0 and outcome >> 32 == accepted and found == prefix_hash
        ]

    def depth_of(self, slot: int, entry: int) -> int:
        """Tokens ready in a row now. Whose row it is only ``lookup`` can tell."""
        return int(self._depth[slot][entry])

    def goal_of(self, slot: int, entry: int) -> int:
        """Depth a row will reach if nothing stops the draft; see ``depth_of``."""
        return int(self._goal[slot][entry])

    def tokens_of(self, slot: int, entry: int) -> list[int]:
        """Tokens ready in a row now, empty if they cannot be token ids; see ``depth_of``."""
        return self._chain(slot, entry, min(self.depth_of(slot, entry), self.k)) or []

    def _find(self, slot: int, prefix_hash: int, outcome: int) -> Hit | None:
        outcomes, hashes = self._outcome_words[slot].tolist(), self._hash_words[slot]
        row = -1
        for _ in range(outcomes.count(outcome)):
            row = outcomes.index(outcome, row + 1)
            if hashes[row] != prefix_hash:
                continue
            depth = int(self._depth[slot][row])
            if not 0 <= depth <= self.k:
                continue
            tokens = self._chain(slot, row, depth)
            if tokens is not None:
                return Hit(row, depth, tokens)
        return None

    def _chain(self, slot: int, row: int, depth: int) -> list[int] | None:
        """The first tokens of a row, None if they cannot be token ids."""
        words = self._token_words[slot]
        tokens = words[row : depth * self.entries : self.entries].tolist()
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            return None
        return tokens
