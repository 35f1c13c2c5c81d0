"""Input of launches that were queued before it was known.

Copying input to a GPU and launching a graph of some hundred kernels cost the host a tenth of a
millisecond. A step can be on the GPU's queue before that: its first kernel waits until the host has
written the input, and then this launch's number, to pinned memory, and fetches it from there.

Whatever is queued behind such a launch does not run before the mail has come, and a host that waits
for it waits for ever. So whoever launches ahead must send the mail, whatever happens.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from models.cuda.device import acquire, waiting_options
from models.cuda.overlap import after_previous
from models.cuda.staging import Staging

KEPT = 2
"""Launches whose mail is kept: one that is being fetched and the one after it."""
_HEAD = 2  # words before the input; keeps it aligned
_BLOCK = 512  # words a program fetches

_KEPT, _FIRST = tl.constexpr(KEPT), tl.constexpr(_HEAD)


@triton.jit(do_not_specialize=["number", "count"])
def _fetch_kernel(
    inputs,
    words,
    number,
    count,
    BLOCK: tl.constexpr,
    SPINS: tl.constexpr,
    DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    box = words + (number % _KEPT) * (_FIRST + count)
    mailed = tl.load(box, volatile=True)
    spins = tl.full((), 0, tl.int64)
    while (mailed != number) & (spins < SPINS):
        mailed = tl.load(box, volatile=True)
        spins += 1
    acquire(DEVICE)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = (i < count) & (mailed == number)
    word = tl.load(box + _FIRST + i, mask=wanted, other=0, volatile=True)
    tl.store(inputs + i, word, mask=wanted)


class Mailbox:
    """Takes what the host writes into a graph's staging arrays to its launches."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        size = (KEPT, _HEAD + staging.host_words.size)
        pinned = staging.words.is_cuda
        self._words = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._host: np.ndarray = self._words.numpy()
        self.fetch(0)  # which is there: the kernel is compiled now, not in the middle of a step

    def fetch(self, number: int) -> None:
        """Queue the wait for the mail of launch ``number`` (from 1 on), and its way to the device
        tensors. Without a GPU there is no queue, and nothing is fetched unless it is there."""
        count = self._staging.host_words.size
        _fetch_kernel[(triton.cdiv(count, _BLOCK),)](
            self._staging.words,
            self._words,
            number,
            count,
            _BLOCK,
            num_warps=1,
            **waiting_options(self._staging.words),
        )

    def send(self, number: int) -> None:
        """The host arrays are the input of launch ``number``, the one before last has fetched its
        own; does not wait."""
        box = self._host[number % KEPT]
        box[_HEAD:] = self._staging.host_words
        box[0] = number  # stores become visible in this order
