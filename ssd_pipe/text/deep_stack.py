"""Calls of libraries that recurse once for each level of what a client sends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

STACK_BYTES = 256 << 20
"""Address space only: memory is taken as far down as a call goes. The usual 8 MiB end at some
thousand references in a row, which a schema of 64 KiB can hold, and with them the process."""

T = TypeVar("T")

_starting = threading.Lock()


def on_deep_stack(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, called on a thread that has a stack of STACK_BYTES."""
    with ThreadPoolExecutor(1, "deep") as pool:
        # The size is that of all threads the process starts meanwhile.
        with _starting:
            usual = threading.stack_size(STACK_BYTES)
            try:
                doing = pool.submit(work)
            finally:
                threading.stack_size(usual)
        return doing.result()
