"""The head of a glue pass of one row: its input, in one piece from the host or from a record.

A pass that was launched before its round's outcome was known waits for the record that the target's
GPU makes of it, and feeds itself what the draft would be told: after a hit, the outcome's token and
the chain that is verified now, whose branches follow; after a miss the token alone, whose pass is
the first of the backup. Anything else makes the launch void.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
import triton
import triton.language as tl

from ipc import round_records as rr
from models.cuda.device import acquire, release, waiting_options
from models.cuda.noise import mix_key
from models.cuda.overlap import after_previous
from models.cuda.rounds.constants import (
    ABORT,
    ACCEPTED,
    FINISHED,
    FLAGS,
    IDLE,
    READY,
    RECORD_HEAD,
    ROOM,
    ROUNDS,
    TOKEN,
)
from models.cuda.rounds.tables import RoundTables

WANTED_WORDS = 5
"""What a launch is fed: a mode, a number, committed tokens, prefix hash, place among the leased
rows."""


class Mode(IntEnum):
    """Where the input comes from.

    FOLLOW: from the record of that number; tokens and hash are those before its outcome. GIVEN:
    from the host, for the leased round of that number, 0 without a lease; the last committed token
    is the first fed.
    """

    LOADED = 0
    FOLLOW = 1
    GIVEN = 2


class Verdict(IntEnum):
    """What became of a launch."""

    VOID = 0
    HIT = 1
    MISS = 2


_VERDICTS = 4
_FOLLOW, _GIVEN = tl.constexpr(int(Mode.FOLLOW)), tl.constexpr(int(Mode.GIVEN))
_HIT, _MISS = tl.constexpr(int(Verdict.HIT)), tl.constexpr(int(Verdict.MISS))
_PER_NUMBER = tl.constexpr(_VERDICTS)


@triton.jit
def _follow_kernel(
    wanted,
    given,
    by_length,
    tokens,
    starts,
    counts,
    budgets,
    limits,
    numbers,
    hashes,
    box,
    records,
    control,
    max_rows,
    vocab,
    WIDTH: tl.constexpr,
    WIDTH_P: tl.constexpr,
    RECORD: tl.constexpr,
    SPINS: tl.constexpr,
    DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    mode = tl.load(wanted)
    number = tl.load(wanted + 1)
    i = tl.arange(0, WIDTH_P)
    if mode == _GIVEN:
        words = tl.load(given + i, mask=i < WIDTH, other=-1)
        count = tl.sum((words >= 0).to(tl.int32), axis=0)
        tl.store(tokens + i, tl.maximum(words, 0), mask=i < WIDTH)
        tl.store(starts, tl.load(wanted + 2) - 1)
        tl.store(counts, count)
        most = tl.load(by_length + (count - 1) * WIDTH + i, mask=i < WIDTH)
        tl.store(limits + i, most, mask=i < WIDTH)
        tl.store(numbers, number)
        tl.store(hashes, tl.load(wanted + 3))
    if mode == _FOLLOW:
        record = records + ((number % ROUNDS) * max_rows + tl.load(wanted + 4)) * RECORD
        came = tl.load(record, volatile=True)
        end = came == number
        spins = tl.full((), 0, tl.int64)
        # A record that is there is followed, called off or not: the host counts on that. Only an
        # abort can end a wait before its record comes, and nothing of a lease is told after one.
        while end == 0:
            called_off = tl.load(box + 1, volatile=True) >= number
            aborted = tl.load(control + ABORT, volatile=True) != 0
            spins += 1
            came = tl.load(record, volatile=True)
            end = (came == number) | called_off | aborted | (spins >= SPINS)
        acquire(DEVICE)
        K: tl.constexpr = WIDTH - 1
        k = tl.load(record + ACCEPTED, volatile=True)
        token = tl.load(record + TOKEN, volatile=True)
        ready = tl.load(record + READY, volatile=True)
        room = tl.load(record + ROOM, volatile=True)
        length = tl.minimum(tl.minimum(ready, room), K)
        following = tl.load(record + RECORD_HEAD + K + i, mask=i < length, other=0, volatile=True)
        over = tl.load(record + FLAGS, volatile=True) & (FINISHED | IDLE)
        good = (came == number) & (over == 0)
        good = good & (k >= 0) & (k < WIDTH) & (token >= 0) & (token < vocab) & (room > 0)
        bad = tl.sum(((following < 0) | (following >= vocab)).to(tl.int32), axis=0)
        hit = good & (length > 0) & (bad == 0)
        miss = good & (ready == 0)
        length = tl.where(hit, length, 0)
        h = tl.load(wanted + 3).to(tl.uint64, bitcast=True)
        for j in range(WIDTH):
            said = tl.load(record + RECORD_HEAD + j, mask=j < k, other=0, volatile=True)
            h = tl.where(j <= k, mix_key(h, tl.where(j < k, said, token)), h)
        tl.store(tokens + 1 + i, tl.where(i < length, following, 0), mask=i < K)
        tl.store(tokens, tl.where(good, token, 0))
        tl.store(starts, tl.load(wanted + 2) + tl.where(good, k, 0))
        tl.store(counts, tl.where(hit | miss, 1 + length, 0).to(tl.int32))
        limit = tl.load(by_length + length * WIDTH + i, mask=i < WIDTH)
        tl.store(limits + i, limit, mask=i < WIDTH)
        tl.store(numbers, tl.where(hit, number + 1, 0))
        tl.store(hashes, h.to(tl.int64, bitcast=True))
        budget = tl.load(budgets)
        tl.debug_barrier()
        tl.store(budgets, tl.where(hit, budget, 0))
        release(DEVICE)
        tl.store(box, number * _PER_NUMBER + tl.where(hit, _HIT, tl.where(miss, _MISS, 0)))


@dataclass(slots=True)
class Fed:
    """Where a launch's input goes, on the device.

    Attributes:
        tokens, starts, counts: the glue pass's, int64 [1, K + 1], int64 [1], int32 [1].
        budgets, limits: of branches, int32 [1], int32 [1, K + 1]; without a budget there are none.
        numbers, hashes: the tree's round and prefix hash, int64 [1].
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    budgets: torch.Tensor
    limits: torch.Tensor
    numbers: torch.Tensor
    hashes: torch.Tensor


class Follower:
    """Makes the inputs of glue passes of one row.

    Args:
        tables: with control and records; without them no record can be followed.
    """

    def __init__(self, tables: RoundTables | None, device: torch.device) -> None:
        if tables is not None and (tables.control is None or tables.records is None):
            raise ValueError("tables without records to follow")
        self._tables = tables
        self._box = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._words: np.ndarray = self._box.numpy()

    @property
    def has_records(self) -> bool:
        """Whether launches can follow records."""
        return self._tables is not None

    def feed(
        self, wanted: torch.Tensor, given: torch.Tensor, options: torch.Tensor, fed: Fed
    ) -> None:
        """Queue what makes the input, as ``wanted`` says.

        Args:
            wanted: int64 [WANTED_WORDS].
            given: int64 [K + 1], the tokens to feed, then -1.
            options: int32 [K + 1, K + 1]; row n are the limits for a chain of n tokens.
        """
        tables, width = self._tables, fed.tokens.shape[1]
        box, k = self._box, width - 1
        records, control, rows, vocab = box, box, 1, 1  # nobody looks at them without records
        if tables is not None and tables.records is not None and tables.control is not None:
            records, control = tables.records, tables.control
            rows, vocab, k = tables.max_rows, tables.vocab_size, tables.k
        _follow_kernel[(1,)](
            wanted,
            given,
            options,
            fed.tokens,
            fed.starts,
            fed.counts,
            fed.budgets,
            fed.limits,
            fed.numbers,
            fed.hashes,
            self._box,
            records,
            control,
            rows,
            vocab,
            width,
            triton.next_power_of_2(width),
            rr.record_words(k),
            num_warps=1,
            **waiting_options(fed.tokens),
        )

    def verdict(self, number: int) -> Verdict | None:
        """What became of the launch that follows record ``number``; None while it waits."""
        said = int(self._words[0])
        return Verdict(said % _VERDICTS) if said // _VERDICTS == number else None

    def call_off(self, number: int) -> None:
        """The launch that follows record ``number`` is to wait no longer."""
        self._words[1] = number
