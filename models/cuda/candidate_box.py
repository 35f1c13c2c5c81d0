"""What a glue pass's branches were chosen from, written by its graph to memory the host reads.

Copies queued behind the graph and an event for their end would cost the host more than all else of
a launch.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from models.cuda.device import launch_options, release
from models.cuda.overlap import after_previous

SIDES = 2
"""Passes that are kept: one is studied while the next one runs."""

_SIDES = tl.constexpr(SIDES)


@triton.jit
def _export_kernel(
    serial,
    top_tokens,
    top_scores,
    next_scores,
    tokens,
    scores,
    own,
    arrived,
    CELLS: tl.constexpr,
    PLACES: tl.constexpr,
    PLACES_P: tl.constexpr,
    BLOCK: tl.constexpr,
    DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    number = tl.load(serial)
    if number > 0:
        side = number % _SIDES
        for first in range(0, CELLS, BLOCK):
            i = first + tl.arange(0, BLOCK)
            inside = i < CELLS
            at = side * CELLS + i
            tl.store(tokens + at, tl.load(top_tokens + i, mask=inside), mask=inside)
            tl.store(scores + at, tl.load(top_scores + i, mask=inside), mask=inside)
        j = tl.arange(0, PLACES_P)
        there = j < PLACES
        tl.store(own + side * PLACES + j, tl.load(next_scores + j, mask=there), mask=there)
        release(DEVICE)
        tl.store(arrived, number)


class CandidateBox:
    """The candidates of one glue graph of R rows of W tokens, n each.

    Passes have rising numbers from 1 on; those of the last two are kept.
    """

    def __init__(self, rows: int, width: int, n: int, device: torch.device) -> None:
        pinned = device.type == "cuda"

        def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        self._tokens = filled(torch.int64, SIDES, rows, width, n)
        self._scores = filled(torch.float32, SIDES, rows, width, n)
        self._own = filled(torch.float32, SIDES, rows, width)
        self._arrived = filled(torch.int64, 1)
        self._views = [t.numpy() for t in (self._tokens, self._scores, self._own)]
        self._word: np.ndarray = self._arrived.numpy()

    def export(
        self,
        serial: torch.Tensor,
        top_tokens: torch.Tensor,
        top_scores: torch.Tensor,
        next_scores: torch.Tensor,
    ) -> None:
        """The end of a pass.

        Args:
            serial: int64 [1], its number; 0 keeps nothing.
            top_tokens, top_scores, next_scores: int64 and float32 [R, W, n], float32 [R, W].
        """
        places = next_scores.numel()
        _export_kernel[(1,)](
            serial,
            top_tokens,
            top_scores,
            next_scores,
            self._tokens,
            self._scores,
            self._own,
            self._arrived,
            top_tokens.numel(),
            places,
            triton.next_power_of_2(places),
            1024,
            num_warps=4,
            **launch_options(serial),
        )

    def arrived(self, number: int) -> bool:
        """Whether pass ``number`` has ended."""
        return bool(self._word[0] >= number)

    def side(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, scores and the chain's own scores of pass ``number``, which fill when it ends
        and are overwritten by the next but one."""
        tokens, scores, own = (view[number % SIDES] for view in self._views)
        return tokens, scores, own
