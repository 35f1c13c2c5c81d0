"""Between scheduler and draft, once a round."""

from __future__ import annotations

import msgspec

from ipc.messages.sampling import NoiseKey

# ---------------------------------------------------------------- scheduler -> draft


class DraftStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a draft ``slot`` with its committed ``tokens``."""

    rid: int
    slot: int
    key: NoiseKey
    tokens: list[int]


class DraftRow(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a draft round.

    ``tokens`` extend the committed tokens, which number ``length`` before. ``chain`` is what the
    target verifies now; ``entry`` is the cache entry it came from, -1 if from elsewhere. With
    ``backup`` > 0 the outcome was a miss: speculate a chain of that many tokens just in time,
    answer ChainReady, and take it as this row's chain. ``fork``: speculate on the outcomes of
    verifying that chain, at most k tokens each. ``prefix_hash`` covers every committed
    token, ``tokens`` included. ``after_miss`` picks the fan-out. ``handover`` > 0 numbers the hand
    over of the chain's draft distributions (rejection rule). ``place``: the row's among those of
    its lease's records.
    """

    slot: int
    length: int
    tokens: list[int]
    chain: list[int]
    fork: bool
    prefix_hash: int
    entry: int = -1
    backup: int = 0
    after_miss: bool = False
    handover: int = 0
    place: int = 0


class DraftLease(msgspec.Struct, frozen=True, array_like=True):
    """Rounds ``first`` .. ``first + rounds - 1`` run without plans: the draft follows the records.

    ``backup``: tokens to draft just in time for a miss, 0 = look up n-grams, -1 = nothing;
    ``always`` also when other rows of the round hit, which then wait for it.
    """

    first: int
    rounds: int
    backup: int
    always: bool = False

    def drafts(self, missed: int, rows: int) -> bool:
        """Whether so many misses among so many rows are backed up by drafting."""
        return self.backup > 0 and (self.always or missed == rows)


class DraftPlan(msgspec.Struct, frozen=True, tag="draft", array_like=True):
    """One draft round; it replaces whatever branches the draft is still working on.

    ``fresh``: forget every sequence first. A draft that has just started waits for such a plan:
    what it finds before it was meant for its predecessor. It is always answered by DraftTimes.
    With a ``lease``, its branches are for the outcomes of round ``lease.first``, and the rows are
    the leased ones in order. Records up to round ``read`` come before the plan.
    ``number`` > 0: the leased round this plan is for; plans made from records have one too.

    Branches get at most ``k`` tokens each, and a row at most ``branches`` of them; 0 = as many as
    configured. Where there is nothing but backups to make, the target waits for all of it, and the
    draft may have its cores.
    """

    round: int
    rows: list[DraftRow]
    begin: list[DraftStart] = []
    drop: list[int] = []
    fresh: bool = False
    lease: DraftLease | None = None
    read: int = 0
    number: int = 0
    k: int = 0
    branches: int = 0

    @property
    def record(self) -> int:
        """The round whose record the plan was made from, 0 for a plan of the scheduler's."""
        return self.number - 1 if self.lease is None and self.number else 0


# ---------------------------------------------------------------- draft -> scheduler


class ChainReady(msgspec.Struct, frozen=True, tag="chain", array_like=True):
    """Answer to a DraftRow with ``backup``; empty ``tokens`` if the draft cannot speculate now."""

    round: int
    slot: int
    tokens: list[int]


class DraftTimes(msgspec.Struct, frozen=True, tag="times", array_like=True):
    """Stage times of one draft round, CLOCK_MONOTONIC ns; ``steps`` are tree steps done.

    ``free_blocks``: KV blocks for trunks that are free after it.
    """

    round: int
    started_ns: int
    backup_ns: int
    glue_ns: int
    tree_ns: int
    finished_ns: int
    steps: int
    branches: int
    free_blocks: int


class DepthReady(msgspec.Struct, frozen=True, tag="depth", array_like=True):
    """One more token of every living branch is in the cache; sent when the scheduler waits."""

    round: int
    depth: int


DraftNotice = ChainReady | DraftTimes | DepthReady
