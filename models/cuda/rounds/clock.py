"""The GPU's clock, to compare with the host's."""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.device import launch_options, now
from models.cuda.overlap import after_previous


@triton.jit
def _clock_kernel(words, PDL: tl.constexpr, DEVICE: tl.constexpr):
    after_previous(PDL)
    tl.store(words, now(DEVICE))


def write_clock(words: torch.Tensor, on: torch.Tensor) -> None:
    """The GPU that holds ``on`` writes its clock (ns) to words[0], int64 in registered memory."""
    _clock_kernel[(1,)](words, num_warps=1, **launch_options(on))
