"""A glue pass's branches and what they were chosen from, written by its graph to memory the host
reads.

Copies queued behind the graph and an event for their end would cost the host more than all else of
a launch.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

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
    branches,
    tokens,
    scores,
    own,
    outcomes,
    arrived,
    CELLS: tl.constexpr,
    PLACES: tl.constexpr,
    PLACES_P: tl.constexpr,
    BRANCHES: tl.constexpr,
    BRANCHES_P: tl.constexpr,
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
        e = tl.arange(0, BRANCHES_P)
        chosen = e < BRANCHES
        tl.store(outcomes + side * BRANCHES + e, tl.load(branches + e, mask=chosen), mask=chosen)
        release(DEVICE)
        tl.store(arrived, number)


class Shown(NamedTuple):
    """What the host sees of a pass: filled when it ends, and overwritten by the next but one.

    Attributes:
        tokens, scores: int64 and float32 [R, W, n], candidates after each prefix, best first.
        own: float32 [R, W], scores of the chain's own tokens.
        outcomes: int64 [R, E], k << 32 | t* of each branch, likeliest first, then -1.
    """

    tokens: np.ndarray
    scores: np.ndarray
    own: np.ndarray
    outcomes: np.ndarray


class CandidateBox:
    """The candidates of one glue graph of R rows of W tokens, n each, and the branches chosen from
    them, at most E a row.

    Passes have rising numbers from 1 on; those of the last two are kept.
    """

    def __init__(self, rows: int, width: int, n: int, branches: int, device: torch.device) -> None:
        pinned = device.type == "cuda"

        def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        self._tokens = filled(torch.int64, SIDES, rows, width, n)
        self._scores = filled(torch.float32, SIDES, rows, width, n)
        self._own = filled(torch.float32, SIDES, rows, width)
        self._outcomes = filled(torch.int64, SIDES, rows, branches)
        self._arrived = filled(torch.int64, 1)
        shown = (self._tokens, self._scores, self._own, self._outcomes)
        self._views = [t.numpy() for t in shown]
        self._word: np.ndarray = self._arrived.numpy()

    def export(
        self,
        serial: torch.Tensor,
        top_tokens: torch.Tensor,
        top_scores: torch.Tensor,
        next_scores: torch.Tensor,
        outcomes: torch.Tensor,
    ) -> None:
        """The end of a pass.

        Args:
            serial: int64 [1], its number; 0 keeps nothing.
            top_tokens, top_scores, next_scores: int64 and float32 [R, W, n], float32 [R, W].
            outcomes: int64 [R, E], k << 32 | t* of each branch, likeliest first, then -1.
        """
        places, branches = next_scores.numel(), outcomes.numel()
        _export_kernel[(1,)](
            serial,
            top_tokens,
            top_scores,
            next_scores,
            outcomes,
            self._tokens,
            self._scores,
            self._own,
            self._outcomes,
            self._arrived,
            top_tokens.numel(),
            places,
            triton.next_power_of_2(places),
            branches,
            triton.next_power_of_2(branches),
            1024,
            num_warps=4,
            **launch_options(serial),
        )

    def arrived(self, number: int) -> bool:
        """Whether pass ``number`` has ended."""
        return bool(self._word[0] >= number)

    def side(self, number: int) -> Shown:
        """What is shown of pass ``number``."""
        return Shown(*(view[number % SIDES] for view in self._views))
