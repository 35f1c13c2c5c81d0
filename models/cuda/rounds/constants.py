"""``layout`` and ``ipc.round_records`` as kernels can read them.

Import the names, not the module: what a kernel reaches through a module is not part of the key of
Triton's cache on disk, and a changed layout would meet kernels compiled for the old one.
"""

from __future__ import annotations

import triton.language as tl

from ipc import round_records as rr
from models.cuda.rounds import layout

HEAD, DEPTHS = tl.constexpr(layout.HEAD), tl.constexpr(layout.DEPTHS)
RUN, ENDED = tl.constexpr(layout.RUN), tl.constexpr(layout.ENDED)
MODE, AT, HASH, LEFT, SLOT, NEED, SINCE = (
    tl.constexpr(word)
    for word in (
        layout.MODE,
        layout.AT,
        layout.HASH,
        layout.LEFT,
        layout.SLOT,
        layout.NEED,
        layout.SINCE,
    )
)
STATE_HEAD, STATE_WORDS = tl.constexpr(layout.STATE_HEAD), tl.constexpr(layout.STATE_WORDS)
WAITS, PATIENCE = tl.constexpr(layout.WAITS), tl.constexpr(layout.PATIENCE)
BACKUP_PATIENCE, FIRST = tl.constexpr(layout.BACKUP_PATIENCE), tl.constexpr(layout.FIRST)

ABORT, ROUNDS = tl.constexpr(rr.ABORT), tl.constexpr(rr.ROUNDS)
STOPS, WAIT_BRANCHES = tl.constexpr(rr.MAX_STOPS), tl.constexpr(rr.WAIT_BRANCHES)
MAIL_HEAD, RECORD_HEAD = tl.constexpr(rr.MAIL_HEAD), tl.constexpr(rr.RECORD_HEAD)
ANSWER, LENGTH, SKIP = (tl.constexpr(word) for word in (rr.ANSWER, rr.LENGTH, rr.SKIP))
ACCEPTED, TOKEN, CHAIN, ENTRY = (
    tl.constexpr(word) for word in (rr.ACCEPTED, rr.TOKEN, rr.CHAIN, rr.ENTRY)
)
READY, ROOM, FLAGS = (tl.constexpr(word) for word in (rr.READY, rr.ROOM, rr.FLAGS))
STARTED, CHOSEN, SETTLED, LOOKS = (
    tl.constexpr(word) for word in (rr.STARTED, rr.CHOSEN, rr.SETTLED, rr.LOOKS)
)
FINISHED, IDLE, LATE, ABORTED = (
    tl.constexpr(flag) for flag in (rr.FINISHED, rr.IDLE, rr.LATE, rr.ABORTED)
)
