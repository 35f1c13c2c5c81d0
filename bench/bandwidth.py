"""Memory bandwidth of this machine from a given number of threads: a plain copy, a plain read.

Copying is libc's ``memcpy`` over buffers far larger than any cache, reading is its ``memchr`` for a
byte that is not there. ctypes lets go of the interpreter's lock meanwhile, so threads do overlap.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

BUFFER_BYTES = 256 << 20
ROUNDS = 7


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per second, best of several rounds. ``copy`` counts bytes read and bytes written."""

    threads: int
    copy: float
    read: float


def best(first: Bandwidth, second: Bandwidth) -> Bandwidth:
    """The better figures of two measurements: what disturbed one may have spared the other."""
    return Bandwidth(
        threads=first.threads,
        copy=max(first.copy, second.copy),
        read=max(first.read, second.read),
    )


def measure(
    threads: int, cpus: Sequence[int] = (), size: int = BUFFER_BYTES, rounds: int = ROUNDS
) -> Bandwidth:
    """Measure with ``threads`` threads kept on ``cpus`` (empty = where the caller may run)."""
    libc = ctypes.CDLL(None)
    libc.memchr.restype = libc.memcpy.restype = ctypes.c_void_p
    source, target = np.empty(size, np.uint8), np.empty(size, np.uint8)
    source.fill(0)  # pages never written are all one page of zeros, in the cache
    target.fill(0)
    part = size // threads
    parts = [part * i for i in range(threads)]

    def copy(offset: int) -> None:
        libc.memcpy(
            ctypes.c_void_p(target.ctypes.data + offset),
            ctypes.c_void_p(source.ctypes.data + offset),
            ctypes.c_size_t(part),
        )

    def read(offset: int) -> None:
        libc.memchr(ctypes.c_void_p(source.ctypes.data + offset), 1, ctypes.c_size_t(part))

    with ThreadPoolExecutor(threads, initializer=_pin, initargs=(list(cpus),)) as pool:
        return Bandwidth(
            threads=threads,
            copy=2 * part * threads / _best(pool, copy, parts, rounds),
            read=part * threads / _best(pool, read, parts, rounds),
        )


def _pin(cpus: list[int]) -> None:
    if cpus:
        os.sched_setaffinity(0, cpus)  # the calling thread only


def _best(
    pool: ThreadPoolExecutor, work: Callable[[int], None], parts: Sequence[int], rounds: int
) -> float:
    """Seconds of the fastest round."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        list(pool.map(work, parts))
        times.append(time.perf_counter() - begun)
    return min(times)
