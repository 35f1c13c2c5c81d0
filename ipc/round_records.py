"""What a GPU writes of each round for the processes that follow it, and what they answer.

One segment of 8-byte words, registered with the GPU of target rank 0. During a lease (see
``ssd_pipe.engine.leases``) its kernels write a record a row and round here; scheduler and draft
read them at their own pace. Three parts:

* *control*: the abort word, which ends every wait on the GPU; the recall word, which ends a lease
  early; how far each follower has read; and what takes the GPU's clock to CLOCK_MONOTONIC;
* *mail*, a line a slot: the draft's just-in-time chain for a row that missed, or its word that a
  row got no branches this round, so that nobody waits for them;
* *records*, a ring of ``ROUNDS`` rounds: the chain that was verified, the outcome, and the chain
  the speculation cache gave for the next round.
"""

# Memory order. A record's number is stored after its words, with a system-scope fence between; the
# draft stores a chain before the number that announces it. Readers look at the number first. On
# x86 loads keep their order, and each access below is a call into numpy of its own.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ipc.errors import ConfigError
from ipc.segments import create_or_open_segment, open_segment

ROUNDS = 128
"""Rounds that the ring holds; a follower may lag by less."""
CONTROL = 8  # words
ABORT, RECALL, FOLLOWED, DRAFTED, CLOCK, CLOCK_MARK = range(6)
WAIT_BRANCHES = 1 << 40
"""Bit of ``Lease.waits``: a verification that ends before its branches are known waits for them."""
MAX_STOPS = 8
"""Stop ids a leased row may have."""
MAIL_HEAD = 4
ANSWER, LENGTH, SKIP = range(3)
RECORD_HEAD = 16
(
    NUMBER,
    ACCEPTED,
    TOKEN,
    CHAIN,
    ENTRY,
    READY,
    ROOM,
    FLAGS,
    STARTED,
    CHOSEN,
    SETTLED,
    LOOKS,
) = range(12)
FINISHED, IDLE, LATE, ABORTED = 1, 2, 4, 8
"""Flags of a record: the row's request ended with it; the row had ended before; a wait on the GPU
ran into its deadline; a wait saw the abort word."""
_LINE = 8  # words of a cache line


def mail_words(k: int) -> int:
    """Words of a slot's mail."""
    return _lines(MAIL_HEAD + k)


def record_words(k: int) -> int:
    """Words of a record: the head, the chain verified, the next chain."""
    return _lines(RECORD_HEAD + 2 * k)


class Record(NamedTuple):
    """One row's part of one round.

    Attributes:
        accepted, token: the outcome (k, t*).
        chain: the draft tokens that were verified.
        entry: the cache's row that holds the outcome, -1 if none does.
        next: tokens the cache had of it; empty is a miss.
        room: longest useful chain of the next round.
        flags: FINISHED, IDLE, LATE, ABORTED.
        started, chosen, settled: ns of the GPU's clock: the verification began, its choice was
            there, and the next round's input was.
        looks: how often it had to look again for the cached chain; 0 = no wait.
    """

    accepted: int
    token: int
    chain: list[int]
    entry: int
    next: list[int]
    room: int
    flags: int
    started: int
    chosen: int
    settled: int
    looks: int

    @property
    def idle(self) -> bool:
        return bool(self.flags & IDLE)

    @property
    def finished(self) -> bool:
        return bool(self.flags & (IDLE | FINISHED))


class RoundRecords:
    """View of the segment; see the module's docstring.

    Attributes:
        words: all of it, int64, for the GPU to map.
        control, mail, records: its parts: [CONTROL], [slots, mail words], [ROUNDS, rows, record
            words].
    """

    def __init__(self, memory: npt.NDArray[np.uint8], slots: int, k: int) -> None:
        """Raises ConfigError if the memory is too small."""
        need = self.size_bytes(slots, k)
        if memory.nbytes < need:
            raise ConfigError("records", f"{need} bytes needed, got {memory.nbytes}")
        self.slots, self.k = slots, k
        self.words = memory[:need].view(np.int64)
        mail_end = CONTROL + slots * mail_words(k)
        self.control = self.words[:CONTROL]
        self.mail = self.words[CONTROL:mail_end].reshape(slots, -1)
        self.records = self.words[mail_end:].reshape(ROUNDS, slots, record_words(k))

    @staticmethod
    def size_bytes(slots: int, k: int) -> int:
        """Bytes for so many sequences and chains of up to ``k`` tokens."""
        return 8 * (CONTROL + slots * (mail_words(k) + ROUNDS * record_words(k)))

    @classmethod
    def create(cls, path: Path, slots: int, k: int) -> RoundRecords:
        """The segment cleared, made if missing.

        Raises ResourceError if memory is short or the segment there has another size.
        """
        records = cls(create_or_open_segment(path, cls.size_bytes(slots, k)), slots, k)
        records.words.fill(0)
        return records

    @classmethod
    def open(cls, path: Path, slots: int, k: int) -> RoundRecords:
        """Raises ResourceError if there is none of this shape."""
        return cls(open_segment(path, cls.size_bytes(slots, k)), slots, k)

    # ------------------------------------------------------------------ followers

    def round(self, number: int, rows: int) -> list[Record] | None:
        """Records of the leased rows in round ``number``; None while some are missing."""
        ring = self.records[number % ROUNDS, :rows]
        if (ring[:, NUMBER] != number).any():
            return None
        return [self._record(words) for words in ring.tolist()]

    def _record(self, words: list[int]) -> Record:
        k = self.k
        length = min(max(words[CHAIN], 0), k)
        ready = min(max(words[READY], 0), k)
        verified, following = RECORD_HEAD, RECORD_HEAD + k
        return Record(
            words[ACCEPTED],
            words[TOKEN],
            words[verified : verified + length],
            words[ENTRY],
            words[following : following + ready],
            words[ROOM],
            words[FLAGS],
            words[STARTED],
            words[CHOSEN],
            words[SETTLED],
            words[LOOKS],
        )

    def progress(self, follower: int) -> int:
        """Round up to which a follower (FOLLOWED, DRAFTED) has read."""
        return int(self.control[follower])

    def read(self, follower: int, number: int) -> None:
        """A follower has read round ``number``."""
        self.control[follower] = number

    # ------------------------------------------------------------------ scheduler

    @property
    def recalled(self) -> int:
        """First round of the lease that is to end early."""
        return int(self.control[RECALL])

    def recall(self, first: int) -> None:
        """Ask the target to end the lease that began with round ``first``."""
        self.control[RECALL] = first

    # ------------------------------------------------------------------ anyone

    @property
    def clock_ns(self) -> int:
        """CLOCK_MONOTONIC minus the GPU's clock, ns."""
        return int(self.control[CLOCK])

    @clock_ns.setter
    def clock_ns(self, offset: int) -> None:
        self.control[CLOCK] = offset

    @property
    def aborted(self) -> bool:
        return bool(self.control[ABORT])

    def abort(self) -> None:
        """End every wait on the GPU, for good."""
        self.control[ABORT] = 1

    # ------------------------------------------------------------------ draft

    def answer(self, slot: int, number: int, tokens: Sequence[int]) -> None:
        """The chain for a row that missed in round ``number``; empty if there is none."""
        mail = self.mail[slot]
        mail[MAIL_HEAD : MAIL_HEAD + len(tokens)] = tokens
        mail[LENGTH] = len(tokens)
        mail[ANSWER] = number

    def skip(self, slot: int, number: int) -> None:
        """The row will have no branches for the outcomes of round ``number``."""
        self.mail[slot, SKIP] = number


def _lines(words: int) -> int:
    return -(-words // _LINE) * _LINE
