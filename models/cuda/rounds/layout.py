"""Words of the speculation cache and of a lease's state, all int64.

A slot's part of the cache::

    [0] progress = number * DEPTHS + depth, -1 while keys change
    [1] prefix hash before the outcomes
    [HEAD .. HEAD + E) outcome k << 32 | t*, -1 for none
    [HEAD + E + j * E + e] token j of branch e

``number`` is the round whose outcomes the branches are for. Every branch of a slot is equally
deep.
"""

from __future__ import annotations

from ipc.round_records import MAX_STOPS

HEAD = 8
DEPTHS = 64
"""The kernels take progress apart by shifting."""

OFF, RUN, ENDED = 0, 1, 2
"""Modes of a row."""

MODE, AT, HASH, LEFT, SLOT, NEED, SINCE = range(7)
"""Words of a row's state; its stop ids follow from STATE_HEAD on."""
STATE_HEAD = 8
STATE_WORDS = STATE_HEAD + MAX_STOPS

WAITS, PATIENCE, BACKUP_PATIENCE, FIRST = range(4)
"""Words all rows of a lease share."""
LEASE_WORDS = 8


def table_words(entries: int, k: int) -> int:
    """Words of a slot's part of the cache, for ``entries`` branches of ``k`` tokens."""
    return -(-(HEAD + entries + k * entries) // 8) * 8
