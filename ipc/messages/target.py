"""Between scheduler and target, once a step or once a lease."""

from __future__ import annotations

import msgspec

from ipc.messages.sampling import NoiseKey

TOKEN_BYTES = 5  # of a token id in MessagePack, at most

# ---------------------------------------------------------------- scheduler -> target


class SeqStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes ``slot``; its block table there starts empty.

    ``tokens``: those whose K/V the prefix cache had, where ``key.processors`` look at tokens; no
    row brings them. ``logprobs``: as in AddRequest.
    """

    rid: int
    slot: int
    key: NoiseKey
    tokens: list[int] = []
    logprobs: int = -1


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a target step.

    ``tokens`` are fed at positions start.. ; the last ``chain`` of them are proposals under
    verification. ``sample`` is False for a prompt chunk that is not the last. ``blocks`` are
    appended to the slot's block table first. ``handover`` > 0 numbers the draft distributions
    that judge the chain (rejection rule); 0 means the chain is deterministic (a point mass).
    """

    slot: int
    start: int
    tokens: list[int]
    chain: int
    sample: bool
    blocks: list[int]
    handover: int = 0


class RowLease(msgspec.Struct, frozen=True, array_like=True):
    """What the GPU needs to follow one row by itself.

    ``prefix_hash`` covers every committed token, ``left`` output tokens are still allowed, and any
    of ``stop_ids`` ends the row. ``draws``: replayed outcomes, accepted * 2 + hit, one a round.
    """

    prefix_hash: int
    left: int
    stop_ids: list[int] = []
    draws: list[int] = []


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Leave to run ``rounds`` rounds, numbered from ``first``, without the scheduler.

    The plan's rows are the leased ones. ``waits``: bit d says that a cached chain of d tokens waits
    for its next one. ``patience_us``: the longest that any row waits for its cached chain, and for
    a backup.
    """

    first: int
    rounds: int
    waits: int
    patience_us: int
    backup_patience_us: int
    rows: list[RowLease]


class StepPlan(msgspec.Struct, frozen=True, tag="plan", array_like=True):
    """One target step, or a lease's first; ``drop`` frees slots before ``begin`` fills them.

    ``alone``: the draft does nothing meanwhile, so the target may have its cores.
    """

    step: int
    rows: list[StepRow]
    begin: list[SeqStart] = []
    drop: list[int] = []
    lease: Lease | None = None
    alone: bool = False


class RowAhead(msgspec.Struct, frozen=True, array_like=True):
    """What the target needs to make the next step's part of one row by itself.

    ``prefix_hash`` covers what was committed before the present step, with which ``left`` output
    tokens were allowed; any of ``stop_ids`` ends the row. ``blocks`` are those of the next step.
    """

    prefix_hash: int
    left: int
    stop_ids: list[int]
    blocks: list[int]


class Ahead(msgspec.Struct, frozen=True, tag="ahead", array_like=True):
    """Leave to go from step ``after`` to the next one without the scheduler's word, if every row
    goes on; the rows are those of ``after``, in order. Without rows it is withdrawn.

    Chains of up to ``k`` tokens come out of the speculation cache: a row that is not in it needs
    the scheduler. A cached chain of d tokens, with more to come, is to wait for the next one if bit
    d of ``waits`` is set, and branches that are not announced yet if bit WAIT_BRANCHES (see
    ``ipc.round_records``) is; a target that cannot, or has waited too long, leaves that to the
    scheduler. With k = 0 the rows decode alone.
    """

    after: int
    k: int = 0
    waits: int = 0
    rows: list[RowAhead] = []


# ---------------------------------------------------------------- target -> scheduler


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability and rank of a chosen token, and the most likely tokens with theirs."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RowOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Outcome (k, t*) of one sampled row, in the order of the plan's sampled rows.

    ``logprobs``, where asked for, are those of the k accepted tokens and of t*. ``failure``, if not
    empty, says why the row's request cannot go on; nothing was chosen then.
    """

    accepted: int
    token: int
    logprobs: list[Logprobs] = []
    failure: str = ""


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The chain that a row goes on with, and the cache's entry it came from, -1 for none."""

    chain: list[int]
    entry: int


class StepResult(msgspec.Struct, frozen=True, tag="result", array_like=True):
    """What a target step gave. Times are CLOCK_MONOTONIC ns: received, forward done, sampled.

    At the end of a lease ``rounds`` is how many of its rounds ran; their outcomes are in the
    records. ``found``, a row each, says that the next step has begun (see Ahead).
    ``looked_up_ns``: when the outcomes had been looked up, 0 if they were not; ``waited_ns``: when
    a wait for branches, or for more of a chain, was over, with or without it, 0 if there was none.
    """

    step: int
    outcomes: list[RowOutcome]
    started_ns: int
    forward_ns: int
    finished_ns: int
    rounds: int = 0
    found: list[Found] = []
    looked_up_ns: int = 0
    waited_ns: int = 0
