"""The end of a verification: outcome, lookup, record, and the next input."""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ipc import round_records as rr
from models.cuda.device import acquire, now, release, waiting_options
from models.cuda.noise import mix_key
from models.cuda.overlap import after_previous
from models.cuda.rounds.constants import (
    ABORT,
    ABORTED,
    ACCEPTED,
    AT,
    CHAIN,
    CHOSEN,
    DEPTHS,
    ENDED,
    ENTRY,
    FINISHED,
    FIRST,
    FLAGS,
    HASH,
    HEAD,
    IDLE,
    LATE,
    LEFT,
    LOOKS,
    MODE,
    NEED,
    PATIENCE,
    READY,
    RECORD_HEAD,
    ROOM,
    ROUNDS,
    RUN,
    SETTLED,
    SINCE,
    SKIP,
    SLOT,
    STARTED,
    STATE_HEAD,
    STATE_WORDS,
    STOPS,
    TOKEN,
    WAIT_BRANCHES,
    WAITS,
)
from models.cuda.rounds.tables import RoundTables


@triton.jit
def _synthetic_outcome(k, token, n, draw, keyed, outcomes, lanes, vocab, ENTRIES: tl.constexpr):
    """What replayed acceptance puts in an outcome's place; see ``engine.synthetic``.

    ``draw`` = accepted * 2 + hit.
    """
    k = tl.minimum(draw >> 1, n)
    known = keyed & (lanes < ENTRIES) & (outcomes >= 0) & ((outcomes >> 32) == k)
    count = tl.sum(known.to(tl.int32), axis=0)
    ids = tl.where(known, outcomes & 0xFFFFFFFF, -1)
    # Which of several is asked for must not always be the likeliest one.
    pick = (draw + token) % tl.maximum(count, 1)
    rank = tl.cumsum(known.to(tl.int32), axis=0) - 1
    hit = tl.sum(tl.where(known & (rank == pick), ids, 0), axis=0)
    miss = (tl.max(ids, axis=0) + 1) % vocab
    return k, tl.where(((draw & 1) == 1) & (count > 0), hit, miss)


@triton.jit
def _settle_kernel(
    chosen,
    tokens,
    starts,
    counts,
    state,
    lease,
    draws,
    table,
    control,
    mail,
    records,
    max_rows,
    vocab,
    WIDTH: tl.constexpr,
    WIDTH_P: tl.constexpr,
    ENTRIES: tl.constexpr,
    ENTRIES_P: tl.constexpr,
    TABLE: tl.constexpr,
    MAIL: tl.constexpr,
    RECORD: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    SPINS: tl.constexpr,
    DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    s = state + row * STATE_WORDS
    mode = tl.load(s + MODE)
    number = tl.load(s + AT)
    record = records + ((number % ROUNDS) * max_rows + row) * RECORD
    if mode == ENDED:
        tl.store(record + FLAGS, IDLE)
        release(DEVICE)
        tl.store(record, number)
        tl.store(s + AT, number + 1)
    K: tl.constexpr = WIDTH - 1
    if mode == RUN:
        since = now(DEVICE)
        base = table + tl.load(s + SLOT) * TABLE
        box = mail + tl.load(s + SLOT) * MAIL
        waits = tl.load(lease + WAITS)
        patience = tl.load(lease + PATIENCE)
        prefix = tl.load(s + HASH)
        left = tl.load(s + LEFT)
        n = tl.load(counts + row).to(tl.int64) - 1
        i = tl.arange(0, WIDTH_P)
        fed = tokens + row * WIDTH
        chain = tl.load(fed + 1 + i, mask=i < n, other=-1)
        choice = tl.load(chosen + row * WIDTH + i, mask=i < WIDTH, other=-2)
        k = tl.min(tl.where((i < n) & (chain == choice), WIDTH_P, i), axis=0).to(tl.int64)
        token = tl.sum(tl.where(i == k, choice, 0), axis=0)

        # Its branches, if they are known, or once they are.
        flags = tl.full((), 0, tl.int64)
        progress = tl.load(base, volatile=True)
        spins = tl.full((), 0, tl.int64)
        end = tl.where((waits & WAIT_BRANCHES) != 0, 0, 1)
        while ((progress >> 6) != number) & (end == 0):
            aborted = tl.load(control + ABORT, volatile=True) != 0
            skipped = tl.load(box + SKIP, volatile=True) == number
            spins += 1
            late = (now(DEVICE) - since > patience) | (spins >= SPINS)
            flags = tl.where(aborted, ABORTED, tl.where(late & (skipped == 0), LATE, flags))
            end = tl.where(aborted | skipped | late, 1, end)
            progress = tl.load(base, volatile=True)
        acquire(DEVICE)
        lanes = tl.arange(0, ENTRIES_P)
        outcomes = tl.load(base + HEAD + lanes, mask=lanes < ENTRIES, other=-1, volatile=True)
        keyed = ((progress >> 6) == number) & (tl.load(base + 1, volatile=True) == prefix)
        if SYNTHETIC:
            draw = tl.load(draws + ((number - tl.load(lease + FIRST)) * max_rows + row))
            k, token = _synthetic_outcome(k, token, n, draw, keyed, outcomes, lanes, vocab, ENTRIES)
        wanted = (k << 32) | token
        entry = tl.min(tl.where(keyed & (outcomes == wanted), lanes, ENTRIES_P), axis=0)
        found = entry < ENTRIES

        # As deep as pays.
        depth = tl.where(found, progress & (DEPTHS - 1), 0)
        end = tl.where(found, 0, 1)
        while (depth < K) & (((waits >> depth) & 1) != 0) & (end == 0):
            aborted = tl.load(control + ABORT, volatile=True) != 0
            progress = tl.load(base, volatile=True)
            spins += 1
            late = (now(DEVICE) - since > patience) | (spins >= SPINS)
            moved = (progress >> 6) != number
            flags = tl.where(aborted, ABORTED, tl.where(late, LATE, flags))
            end = tl.where(aborted | late | moved, 1, end)
            depth = tl.where(moved, depth, progress & (DEPTHS - 1))
        acquire(DEVICE)
        depth = tl.minimum(depth, K)
        have = i < depth
        at = base + HEAD + ENTRIES + i * ENTRIES + entry
        following = tl.load(at, mask=have, other=0, volatile=True)
        bad = tl.sum(((following < 0) | (following >= vocab)).to(tl.int32), axis=0)
        acquire(DEVICE)
        torn = (tl.load(base, volatile=True) >> 6) != number
        ready = tl.where((bad != 0) | torn, 0, depth)

        # What it means for the row.
        emitted = tl.where(i < k, chain, tl.where(i == k, token, -1))
        counted = (i <= k) & (i < left)
        stops = tl.load(s + STATE_HEAD + tl.arange(0, STOPS))
        stopping = (emitted[:, None] == stops[None, :]) & counted[:, None]
        stopped = tl.sum(tl.sum(stopping.to(tl.int32), axis=1), axis=0) > 0
        finished = stopped | (k + 1 >= left)
        room = tl.maximum(tl.minimum(left - k - 2, K), 0)
        flags = tl.where(finished, flags | FINISHED, flags)

        verified = record + RECORD_HEAD
        tl.store(record + ACCEPTED, k)
        tl.store(record + TOKEN, token)
        tl.store(record + CHAIN, n)
        tl.store(record + ENTRY, tl.where(found, entry.to(tl.int64), -1))
        tl.store(record + READY, ready)
        tl.store(record + ROOM, room)
        tl.store(record + FLAGS, flags)
        tl.store(record + STARTED, tl.load(s + SINCE))
        tl.store(record + CHOSEN, since)
        tl.store(record + SETTLED, now(DEVICE))
        tl.store(record + LOOKS, spins)
        tl.store(verified + i, chain, mask=i < n)
        tl.store(verified + K + i, following, mask=i < ready)
        release(DEVICE)
        tl.store(record, number)

        # The next step's input.
        h = prefix.to(tl.uint64, bitcast=True)
        for j in range(WIDTH):
            said = tl.load(fed + 1 + j, mask=j < k, other=0)
            said = tl.where(j < k, said, token)
            h = tl.where(j <= k, mix_key(h, said), h)
        length = tl.where(finished, -1, tl.minimum(ready, room))
        tl.debug_barrier()
        tl.store(fed + 1 + i, following, mask=i < length)
        tl.store(fed, token)
        tl.store(counts + row, (1 + length).to(tl.int32))
        tl.store(starts + row, tl.load(starts + row) + k + 1)
        tl.store(s + MODE, tl.where(finished, ENDED, RUN).to(tl.int64))
        tl.store(s + AT, number + 1)
        tl.store(s + HASH, h.to(tl.int64, bitcast=True))
        tl.store(s + LEFT, left - k - 1)
        tl.store(s + NEED, ((ready == 0) & (room > 0)).to(tl.int64))


def settle(
    tables: RoundTables,
    chosen: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    state: torch.Tensor,
    lease: torch.Tensor,
    draws: torch.Tensor,
    synthetic: bool,
) -> None:
    """Queue the end of a verification; it may wait for branches as long as the lease says.

    Args:
        chosen: int64 [R, K + 1], the target's choices.
        inputs: "tokens" int64 [R, K + 1], "starts" int64 [R], "counts" int32 [R], which are
            read and written.
        state: int64 [>= R, STATE_WORDS], written too; lease: int64 [LEASE_WORDS].
        draws: int64 [ROUNDS, max_rows], accepted * 2 + hit; with ``synthetic`` only.
    """
    rows, width = chosen.shape
    _settle_kernel[(rows,)](
        chosen,
        inputs["tokens"],
        inputs["starts"],
        inputs["counts"],
        state,
        lease,
        draws,
        tables.table,
        tables.control,
        tables.mail,
        tables.records,
        tables.max_rows,
        tables.vocab_size,
        width,
        triton.next_power_of_2(width),
        **tables.cache_shape,
        MAIL=rr.mail_words(tables.k),
        RECORD=rr.record_words(tables.k),
        SYNTHETIC=synthetic,
        num_warps=1,
        **waiting_options(chosen),
    )
