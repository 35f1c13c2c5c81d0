"""What Linux keeps of a process by prctl(2): its name, and the signal its parent's end gives it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_TITLE_BYTES = 15  # the kernel keeps no more
# Found here: between fork and exec nothing may be looked up.
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_TERM = ctypes.c_ulong(signal.SIGTERM)


def set_title(title: str) -> None:
    """What ps and top call this process; its first 15 bytes count."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(title.encode()[:_TITLE_BYTES]), 0, 0, 0)


def end_with_parent() -> int:
    """Have SIGTERM sent to this process when the thread that started it ends.

    Returns the process id of its parent. If that is not the one which started it, the parent ended
    before and no signal will come. Two system calls, so fit for a ``preexec_fn`` beside threads.
    """
    _prctl(_PR_SET_PDEATHSIG, _TERM, 0, 0, 0)
    return os.getppid()
