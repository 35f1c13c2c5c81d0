"""What a step chose, written by its graph to memory that the host reads.

A copy queued behind the graph and a wait for the stream cost tens of microseconds between two
steps; here the last kernel stores the tokens, then the launch's number, in pinned memory, and the
host looks at the number. The same kernel can make the choices the inputs of another launch, so that
rows that decode one token at a time are queued before anybody has read their tokens.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from models.cuda.device import launch_options, release
from models.cuda.overlap import after_previous

KEPT = 2
"""Launches whose choices are kept: the one awaited and one queued behind it."""
_HEAD = 2  # words before the choices; keeps them aligned

_KEPT, _FIRST = tl.constexpr(KEPT), tl.constexpr(_HEAD)


@triton.jit
def _post_kernel(
    chosen,
    starts,
    counts,
    to_tokens,
    to_starts,
    to_counts,
    ended,
    words,
    ROWS: tl.constexpr,
    ROWS_P: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES_P: tl.constexpr,
    TO_WIDTH: tl.constexpr,
    DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    number = tl.load(ended) + 1
    box = words + (number % _KEPT) * (_FIRST + ROWS * WIDTH)
    i = tl.arange(0, CHOICES_P)
    inside = i < ROWS * WIDTH
    tl.store(box + _FIRST + i, tl.load(chosen + i, mask=inside), mask=inside)
    release(DEVICE)
    tl.store(box, number)
    tl.store(ended, number)
    if TO_WIDTH:
        row = tl.arange(0, ROWS_P)
        count = tl.load(counts + row, mask=row < ROWS, other=0)
        live = count > 0
        said = tl.load(chosen + row * WIDTH + count - 1, mask=live)
        start = tl.load(starts + row, mask=live)
        tl.debug_barrier()
        tl.store(to_tokens + row * TO_WIDTH, said, mask=live)
        tl.store(to_starts + row, start + count, mask=live)
        tl.store(to_counts + row, tl.full((ROWS_P,), 1, tl.int32), mask=live)


class Posting:
    """The choices of one graph's launches, as the host sees them.

    Launches have numbers from 1 on; they run in order, and those of the last two are kept.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self._shape = (rows, width)
        pinned = device.type == "cuda"
        size = (KEPT, _HEAD + rows * width)
        self._words = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._host: np.ndarray = self._words.numpy()
        self._ended = torch.zeros(1, dtype=torch.int64, device=device)

    def post(
        self,
        chosen: torch.Tensor,
        inputs: dict[str, torch.Tensor],
        following: dict[str, torch.Tensor] | None,
    ) -> None:
        """The end of a launch.

        Args:
            chosen: int64 [R, W].
            inputs: "tokens" int64 [R, W], "starts" int64 [R], "counts" int32 [R].
            following: inputs of which the choice after each row's last token becomes the one token
                of the row, int64 [R, W'], [R] and int32 [R]; may be the same. None for no such.
        """
        rows, width = self._shape
        to = inputs if following is None else following
        _post_kernel[(1,)](
            chosen,
            inputs["starts"],
            inputs["counts"],
            to["tokens"],
            to["starts"],
            to["counts"],
            self._ended,
            self._words,
            rows,
            triton.next_power_of_2(rows),
            width,
            triton.next_power_of_2(rows * width),
            0 if following is None else to["tokens"].shape[1],
            num_warps=1,
            **launch_options(chosen),
        )

    def begin(self) -> None:
        """Count launches from here; none may be under way."""
        self._ended.zero_()
        self._host[:, 0] = 0

    def arrived(self, number: int) -> bool:
        """Whether launch ``number`` has ended."""
        return bool(self._host[number % KEPT, 0] == number)

    def choices(self, number: int) -> np.ndarray:
        """int64 [R, W] of launch ``number``, which has arrived; overwritten by the next but one."""
        return self._host[number % KEPT, _HEAD:].reshape(self._shape)
