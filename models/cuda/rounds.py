"""The kernels that let one verification follow another with no host between.

A verification graph is wrapped in two of them. *gate*, at its head, waits for the draft's
just-in-time chain where a row's last outcome was a miss. *settle*, at its end, judges the chain by
the target's own choices (shared noise, greedy), looks the outcome up in the speculation cache,
waits (bounded) for as much of the cached chain as pays, writes the next step's input, and posts a
record for scheduler and draft (``ipc.round_records``). *keys* and *depth* are the draft's: they
write the branches of a round and, pass by pass, their tokens.

The cache lies in memory of the *target's* GPU and the draft writes to it over the link: whoever
waits polls its own memory, and a draft that dies takes nothing away that a kernel still reads. A
slot's part of it, in 8-byte words::

    [0] progress = number * 64 + depth, -1 while keys change
    [1] prefix hash before the outcomes
    [8 .. 8 + E) outcome k << 32 | t*, -1 for none
    [8 + E + j * E + e] token j of branch e

``number`` is the round whose outcomes the branches are for. Every branch of a slot is equally
deep. A lookup compares number, hash and outcome, range-checks the tokens, and looks at the number
again at the end, so that a stale or torn row can only cost speed.

Every wait ends at its deadline, at the abort word, or (for branches) when the draft says that it
has none; the record's flags say which.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import triton
import triton.language as tl

from ipc import round_records as rr
from models.cuda.noise import mix_key
from models.cuda.overlap import after_previous, overlap

if TYPE_CHECKING:
    from models.cuda.tree import TreeGraph

HEAD = 8
DEPTHS = 64  # progress = number * DEPTHS + depth
OFF, RUN, ENDED = 0, 1, 2

# Words of a row's state.
MODE, AT, HASH, LEFT, SLOT, NEED, SINCE = range(7)
STATE_HEAD = 8
STATE_WORDS = STATE_HEAD + rr.MAX_STOPS
# Words all rows share.
WAITS, PATIENCE, BACKUP_PATIENCE, FIRST = range(4)
LEASE_WORDS = 8

_HEAD = tl.constexpr(HEAD)
_DEPTHS = tl.constexpr(DEPTHS)
_WAIT_BRANCHES = tl.constexpr(rr.WAIT_BRANCHES)
_STOPS = tl.constexpr(rr.MAX_STOPS)
_OFF, _RUN, _ENDED = (tl.constexpr(v) for v in (OFF, RUN, ENDED))
_MODE, _AT, _HASH, _LEFT, _SLOT, _NEED, _SINCE = (tl.constexpr(v) for v in range(7))
_STATE_HEAD, _STATE_WORDS = tl.constexpr(STATE_HEAD), tl.constexpr(STATE_WORDS)
_WAITS, _PATIENCE, _BACKUP_PATIENCE, _FIRST = (tl.constexpr(v) for v in range(4))
_ROUNDS = tl.constexpr(rr.ROUNDS)
_ABORT = tl.constexpr(rr.ABORT)
_MAIL_HEAD = tl.constexpr(rr.MAIL_HEAD)
_ANSWER, _LENGTH, _SKIP = (tl.constexpr(v) for v in (rr.ANSWER, rr.LENGTH, rr.SKIP))
_RECORD_HEAD = tl.constexpr(rr.RECORD_HEAD)
_ACCEPTED, _TOKEN, _CHAIN, _ENTRY = (
    tl.constexpr(v) for v in (rr.ACCEPTED, rr.TOKEN, rr.CHAIN, rr.ENTRY)
)
_READY, _ROOM, _FLAGS = (tl.constexpr(v) for v in (rr.READY, rr.ROOM, rr.FLAGS))
_STARTED, _CHOSEN, _SETTLED, _LOOKS = (
    tl.constexpr(v) for v in (rr.STARTED, rr.CHOSEN, rr.SETTLED, rr.LOOKS)
)
_FINISHED, _IDLE, _LATE, _ABORTED = (
    tl.constexpr(v) for v in (rr.FINISHED, rr.IDLE, rr.LATE, rr.ABORTED)
)


class Words(Protocol):
    """int64 memory a kernel can use: a tensor, or ``ipc_memory.DeviceMemory``."""

    @property
    def dtype(self) -> torch.dtype: ...

    def data_ptr(self) -> int: ...


def table_words(entries: int, k: int) -> int:
    """Words of a slot's part of the cache."""
    return -(-(HEAD + entries + k * entries) // 8) * 8


@triton.jit
def _now(DEVICE: tl.constexpr):
    """ns of the GPU's clock; 0 under the interpreter, whose waits are counted instead."""
    if DEVICE:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        now = tl.full((), 0, tl.int64)
    return now


@triton.jit
def _acquire(DEVICE: tl.constexpr):
    """What this thread has read comes before what it reads now, for the whole system."""
    if DEVICE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _release(DEVICE: tl.constexpr):
    """What this block has written comes before what it writes now, for the whole system."""
    _acquire(DEVICE)
    tl.debug_barrier()
    _acquire(DEVICE)


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
    s = state + row * _STATE_WORDS
    if tl.load(s + _MODE) == _RUN:
        since = _now(DEVICE)
        tl.store(s + _SINCE, since)
        if tl.load(s + _NEED) != 0:
            wanted = tl.load(s + _AT) - 1
            box = mail + tl.load(s + _SLOT) * MAIL
            patience = tl.load(lease + _BACKUP_PATIENCE)
            answer = tl.load(box + _ANSWER, volatile=True)
            end = tl.load(control + _ABORT, volatile=True)
            spins = tl.full((), 0, tl.int64)
            while (answer != wanted) & (end == 0):
                answer = tl.load(box + _ANSWER, volatile=True)
                end = tl.load(control + _ABORT, volatile=True)
                spins += 1
                late = (_now(DEVICE) - since > patience) | (spins >= SPINS)
                end = tl.where(late, 1, end)
            _acquire(DEVICE)
            i = tl.arange(0, WIDTH_P)
            length = tl.load(box + _LENGTH, volatile=True)
            good = (answer == wanted) & (length >= 0) & (length < WIDTH)
            length = tl.where(good, length, 0)
            chain = tl.load(box + _MAIL_HEAD + i, mask=i < length, other=0, volatile=True)
            bad = tl.sum(((chain < 0) | (chain >= vocab)).to(tl.int32), axis=0)
            length = tl.where(bad == 0, length, 0)
            tl.store(tokens + row * WIDTH + 1 + i, chain, mask=i < length)
            tl.store(counts + row, (1 + length).to(tl.int32))
            tl.store(s + _NEED, 0)
            tl.store(s + _SINCE, _now(DEVICE))


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
    s = state + row * _STATE_WORDS
    mode = tl.load(s + _MODE)
    number = tl.load(s + _AT)
    record = records + ((number % _ROUNDS) * max_rows + row) * RECORD
    if mode == _ENDED:
        tl.store(record + _FLAGS, _IDLE)
        _release(DEVICE)
        tl.store(record, number)
        tl.store(s + _AT, number + 1)
    K: tl.constexpr = WIDTH - 1
    if mode == _RUN:
        since = _now(DEVICE)
        base = table + tl.load(s + _SLOT) * TABLE
        box = mail + tl.load(s + _SLOT) * MAIL
        waits = tl.load(lease + _WAITS)
        patience = tl.load(lease + _PATIENCE)
        prefix = tl.load(s + _HASH)
        left = tl.load(s + _LEFT)
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
        end = tl.where((waits & _WAIT_BRANCHES) != 0, 0, 1)
        while ((progress >> 6) != number) & (end == 0):
            aborted = tl.load(control + _ABORT, volatile=True) != 0
            skipped = tl.load(box + _SKIP, volatile=True) == number
            spins += 1
            late = (_now(DEVICE) - since > patience) | (spins >= SPINS)
            flags = tl.where(aborted, _ABORTED, tl.where(late & (skipped == 0), _LATE, flags))
            end = tl.where(aborted | skipped | late, 1, end)
            progress = tl.load(base, volatile=True)
        _acquire(DEVICE)
        lanes = tl.arange(0, ENTRIES_P)
        outcomes = tl.load(base + _HEAD + lanes, mask=lanes < ENTRIES, other=-1, volatile=True)
        keyed = ((progress >> 6) == number) & (tl.load(base + 1, volatile=True) == prefix)
        if SYNTHETIC:
            draw = tl.load(draws + ((number - tl.load(lease + _FIRST)) * max_rows + row))
            k, token = _synthetic_outcome(k, token, n, draw, keyed, outcomes, lanes, vocab, ENTRIES)
        wanted = (k << 32) | token
        entry = tl.min(tl.where(keyed & (outcomes == wanted), lanes, ENTRIES_P), axis=0)
        found = entry < ENTRIES

        # As deep as pays.
        depth = tl.where(found, progress & (_DEPTHS - 1), 0)
        end = tl.where(found, 0, 1)
        while (depth < K) & (((waits >> depth) & 1) != 0) & (end == 0):
            aborted = tl.load(control + _ABORT, volatile=True) != 0
            progress = tl.load(base, volatile=True)
            spins += 1
            late = (_now(DEVICE) - since > patience) | (spins >= SPINS)
            moved = (progress >> 6) != number
            flags = tl.where(aborted, _ABORTED, tl.where(late, _LATE, flags))
            end = tl.where(aborted | late | moved, 1, end)
            depth = tl.where(moved, depth, progress & (_DEPTHS - 1))
        _acquire(DEVICE)
        depth = tl.minimum(depth, K)
        have = i < depth
        at = base + _HEAD + ENTRIES + i * ENTRIES + entry
        following = tl.load(at, mask=have, other=0, volatile=True)
        bad = tl.sum(((following < 0) | (following >= vocab)).to(tl.int32), axis=0)
        _acquire(DEVICE)
        torn = (tl.load(base, volatile=True) >> 6) != number
        ready = tl.where((bad != 0) | torn, 0, depth)

        # What it means for the row.
        emitted = tl.where(i < k, chain, tl.where(i == k, token, -1))
        counted = (i <= k) & (i < left)
        stops = tl.load(s + _STATE_HEAD + tl.arange(0, _STOPS))
        stopping = (emitted[:, None] == stops[None, :]) & counted[:, None]
        stopped = tl.sum(tl.sum(stopping.to(tl.int32), axis=1), axis=0) > 0
        finished = stopped | (k + 1 >= left)
        room = tl.maximum(tl.minimum(left - k - 2, K), 0)
        flags = tl.where(finished, flags | _FINISHED, flags)

        verified = record + _RECORD_HEAD
        tl.store(record + _ACCEPTED, k)
        tl.store(record + _TOKEN, token)
        tl.store(record + _CHAIN, n)
        tl.store(record + _ENTRY, tl.where(found, entry.to(tl.int64), -1))
        tl.store(record + _READY, ready)
        tl.store(record + _ROOM, room)
        tl.store(record + _FLAGS, flags)
        tl.store(record + _STARTED, tl.load(s + _SINCE))
        tl.store(record + _CHOSEN, since)
        tl.store(record + _SETTLED, _now(DEVICE))
        tl.store(record + _LOOKS, spins)
        tl.store(verified + i, chain, mask=i < n)
        tl.store(verified + K + i, following, mask=i < ready)
        _release(DEVICE)
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
        tl.store(s + _MODE, tl.where(finished, _ENDED, _RUN).to(tl.int64))
        tl.store(s + _AT, number + 1)
        tl.store(s + _HASH, h.to(tl.int64, bitcast=True))
        tl.store(s + _LEFT, left - k - 1)
        tl.store(s + _NEED, ((ready == 0) & (room > 0)).to(tl.int64))


@triton.jit
def _keys_kernel(
    numbers,
    homes,
    hashes,
    outcomes,
    table,
    ENTRIES: tl.constexpr,
    ENTRIES_P: tl.constexpr,
    TABLE: tl.constexpr,
    DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + row)
    if number > 0:
        base = table + tl.load(homes + row) * TABLE
        i = tl.arange(0, ENTRIES_P)
        inside = i < ENTRIES
        outcome = tl.load(outcomes + row * ENTRIES + i, mask=inside)
        tl.store(base, -1)
        _release(DEVICE)
        tl.store(base + 1, tl.load(hashes + row))
        tl.store(base + _HEAD + i, outcome, mask=inside)
        _release(DEVICE)
        tl.store(base, number * _DEPTHS)


@triton.jit
def _depth_kernel(
    numbers,
    homes,
    chosen,
    table,
    depth,
    ENTRIES: tl.constexpr,
    ENTRIES_P: tl.constexpr,
    TABLE: tl.constexpr,
    DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + row)
    if number > 0:
        base = table + tl.load(homes + row) * TABLE
        i = tl.arange(0, ENTRIES_P)
        inside = i < ENTRIES
        token = tl.load(chosen + row * ENTRIES + i, mask=inside)
        tl.store(base + _HEAD + depth * ENTRIES + i, token, mask=inside)
        _release(DEVICE)
        tl.store(base, number * _DEPTHS + depth)


@triton.jit
def _clock_kernel(words, PDL: tl.constexpr, DEVICE: tl.constexpr):
    after_previous(PDL)
    tl.store(words, _now(DEVICE))


@dataclass(slots=True)
class RoundTables:
    """Where the kernels find cache, records and mail, and the shapes of these.

    Attributes:
        table: the cache, int64 [slots, table_words].
        entries, k: its branches a slot and tokens a branch.
        vocab_size: a chain with another token is not taken.
        control, mail, records: see ``ipc.round_records``; None on the draft's side.
        max_rows: second dimension of ``records``.
    """

    table: Words
    entries: int
    k: int
    vocab_size: int
    control: torch.Tensor | None = None
    mail: torch.Tensor | None = None
    records: torch.Tensor | None = None
    max_rows: int = 0

    @property
    def _shape(self) -> dict[str, int]:
        return {
            "ENTRIES": self.entries,
            "ENTRIES_P": triton.next_power_of_2(self.entries),
            "TABLE": table_words(self.entries, self.k),
        }

    def gate(
        self, tokens: torch.Tensor, counts: torch.Tensor, state: torch.Tensor, lease: torch.Tensor
    ) -> None:
        """Head of a verification: rows that missed wait for a chain.

        Args:
            tokens: int64 [R, K + 1], what will be fed; counts: int32 [R].
            state: int64 [>= R, STATE_WORDS]; lease: int64 [LEASE_WORDS].
        """
        rows, width = tokens.shape
        _gate_kernel[(rows,)](
            tokens,
            counts,
            state,
            lease,
            self.control,
            self.mail,
            self.vocab_size,
            width,
            triton.next_power_of_2(width),
            rr.mail_words(self.k),
            num_warps=1,
            **_waiting(tokens),
        )

    def settle(
        self,
        chosen: torch.Tensor,
        inputs: dict[str, torch.Tensor],
        state: torch.Tensor,
        lease: torch.Tensor,
        draws: torch.Tensor,
        synthetic: bool,
    ) -> None:
        """End of a verification: outcome, lookup, record, and the next input.

        Args:
            chosen: int64 [R, K + 1], the target's choices.
            inputs: "tokens" int64 [R, K + 1], "starts" int64 [R], "counts" int32 [R], which are
                read and written.
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
            self.table,
            self.control,
            self.mail,
            self.records,
            self.max_rows,
            self.vocab_size,
            width,
            triton.next_power_of_2(width),
            **self._shape,
            MAIL=rr.mail_words(self.k),
            RECORD=rr.record_words(self.k),
            SYNTHETIC=synthetic,
            num_warps=1,
            **_waiting(chosen),
        )

    def keys(
        self,
        numbers: torch.Tensor,
        homes: torch.Tensor,
        hashes: torch.Tensor,
        outcomes: torch.Tensor,
    ) -> None:
        """Begin a round's branches: int64 [R] round numbers (0 = not in a lease), slots and prefix
        hashes, int64 [R, E] outcomes."""
        _keys_kernel[(numbers.shape[0],)](
            numbers, homes, hashes, outcomes, self.table, **self._shape, num_warps=1, **_on(numbers)
        )

    def depth(
        self, numbers: torch.Tensor, homes: torch.Tensor, chosen: torch.Tensor, depth: int
    ) -> None:
        """Publish token ``depth`` (from 1) of every branch, int64 [R, E]."""
        _depth_kernel[(numbers.shape[0],)](
            numbers, homes, chosen, self.table, depth, **self._shape, num_warps=1, **_on(numbers)
        )


class TreePublisher:
    """``TreeHooks`` that write leased branches to the cache."""

    def __init__(self, tables: RoundTables) -> None:
        self._tables = tables

    def begin(self, graph: TreeGraph) -> None:
        inputs = graph.inputs
        self._tables.keys(*(inputs[n] for n in ("numbers", "homes", "hashes", "outcomes")))

    def step(self, graph: TreeGraph, step: int) -> None:
        numbers, homes = graph.inputs["numbers"], graph.inputs["homes"]
        self._tables.depth(numbers, homes, graph.chosen[step], step + 1)


def write_clock(words: torch.Tensor, on: torch.Tensor) -> None:
    """The GPU that holds ``on`` writes its clock (ns) to words[0], int64 in registered memory."""
    _clock_kernel[(1,)](words, num_warps=1, **_on(on))


def _on(tensor: torch.Tensor) -> dict[str, Any]:
    return {"DEVICE": tensor.is_cuda, **overlap(tensor)}


def _waiting(tensor: torch.Tensor) -> dict[str, Any]:
    """Under the interpreter nobody can come meanwhile: one look is enough."""
    return {"SPINS": 1 << 40 if tensor.is_cuda else 1, **_on(tensor)}
