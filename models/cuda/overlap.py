"""Programmatic dependent launch: a kernel's blocks are in place before the one before it has ended.

Every kernel of a step waits for its predecessor itself, first of all, and at once lets its
successor be launched. What lies between two small kernels, some microseconds, mostly goes away. No
kernel may read or write anything, or return, before it has waited; weights, which nobody writes,
may be read earlier.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SWITCH = "SSD_CUDA_OVERLAP"
"""Environment variable; "0" turns it off."""


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait for the kernel before this one; let the next one be launched."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(rows_at, K, AHEAD: tl.constexpr, PDL: tl.constexpr):
    """Fetch the first AHEAD 16-bit columns of rows that nobody writes to the L2 cache: pointers
    [N, 1] to rows of K columns. Does nothing without overlap."""
    if PDL:
        line = tl.arange(0, AHEAD // 64) * 64
        at = rows_at + tl.where(line < K, line, 0)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [at.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@lru_cache
def supported(index: int) -> bool:
    """Whether kernels on GPU ``index`` overlap."""
    return torch.cuda.get_device_capability(index) >= (9, 0) and os.environ.get(SWITCH) != "0"


def overlap(tensor: torch.Tensor) -> dict[str, Any]:
    """Launch arguments of a kernel that has a ``PDL`` parameter and calls ``after_previous``."""
    if tensor.is_cuda and supported(tensor.device.index or 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
