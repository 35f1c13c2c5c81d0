"""The head of a verification: rows that missed wait for the draft's chain."""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ipc import round_records as rr
from models.cuda.device import acquire, now, waiting_options
from models.cuda.overlap import after_previous
from models.cuda.rounds.constants import (
    ABORT,
    ANSWER,
    AT,
    BACKUP_PATIENCE,
    LENGTH,
    MAIL_HEAD,
    MODE,
    NEED,
    RUN,
    SINCE,
    SLOT,
    STATE_WORDS,
)
from models.cuda.rounds.tables import RoundTables


@triton.jit
def _gate_kernel(
    tokens,
    counts,
    state,
    lease,
    control,
    mail,
    vocab,
    WIDTH: tl.constexpr,
    WIDTH_P: tl.constexpr,
    MAIL: tl.constexpr,
    SPINS: tl.constexpr,
    DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    s = state + row * STATE_WORDS
    if tl.load(s + MODE) == RUN:
        since = now(DEVICE)
        tl.store(s + SINCE, since)
        if tl.load(s + NEED) != 0:
            wanted = tl.load(s + AT) - 1
            box = mail + tl.load(s + SLOT) * MAIL
            patience = tl.load(lease + BACKUP_PATIENCE)
            answer = tl.load(box + ANSWER, volatile=True)
            end = tl.load(control + ABORT, volatile=True)
            spins = tl.full((), 0, tl.int64)
            while (answer != wanted) & (end == 0):
                answer = tl.load(box + ANSWER, volatile=True)
                end = tl.load(control + ABORT, volatile=True)
                spins += 1
                late = (now(DEVICE) - since > patience) | (spins >= SPINS)
                end = tl.where(late, 1, end)
            acquire(DEVICE)
            i = tl.arange(0, WIDTH_P)
            length = tl.load(box + LENGTH, volatile=True)
            good = (answer == wanted) & (length >= 0) & (length < WIDTH)
            length = tl.where(good, length, 0)
            chain = tl.load(box + MAIL_HEAD + i, mask=i < length, other=0, volatile=True)
            bad = tl.sum(((chain < 0) | (chain >= vocab)).to(tl.int32), axis=0)
            length = tl.where(bad == 0, length, 0)
            tl.store(tokens + row * WIDTH + 1 + i, chain, mask=i < length)
            tl.store(counts + row, (1 + length).to(tl.int32))
            tl.store(s + NEED, 0)
            tl.store(s + SINCE, now(DEVICE))


def gate(
    tables: RoundTables,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    state: torch.Tensor,
    lease: torch.Tensor,
) -> None:
    """Queue the wait for chains, which ends at the lease's patience for backups.

    Args:
        tokens: int64 [R, K + 1], what will be fed; counts: int32 [R]. Both are written where a
            chain came.
        state: int64 [>= R, STATE_WORDS]; lease: int64 [LEASE_WORDS].
    """
    rows, width = tokens.shape
    _gate_kernel[(rows,)](
        tokens,
        counts,
        state,
        lease,
        tables.control,
        tables.mail,
        tables.vocab_size,
        width,
        triton.next_power_of_2(width),
        rr.mail_words(tables.k),
        num_warps=1,
        **waiting_options(tokens),
    )
