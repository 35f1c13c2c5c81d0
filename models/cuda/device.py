"""Clock and memory order on the GPU, and how kernels that use them are launched."""
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from models.cuda.overlap import overlap


@triton.jit
def now(DEVICE: tl.constexpr):
    """ns of the GPU's clock; 0 under the interpreter, whose waits are counted instead."""
    if DEVICE:
        ns = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        ns = tl.full((), 0, tl.int64)
    return ns


@triton.jit
def acquire(DEVICE: tl.constexpr):
    """What this thread has read comes before what it reads now, for the whole system."""
    if DEVICE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def release(DEVICE: tl.constexpr):
    """What this block has written comes before what it writes now, for the whole system."""
    acquire(DEVICE)
    tl.debug_barrier()
    acquire(DEVICE)


def launch_options(tensor: torch.Tensor) -> dict[str, Any]:
    """Launch arguments of a kernel with ``DEVICE`` and ``PDL``, for where ``tensor`` is."""
    return {"DEVICE": tensor.is_cuda, **overlap(tensor)}


def waiting_options(tensor: torch.Tensor) -> dict[str, Any]:
    """The same of a kernel that waits, with ``SPINS``. Under the interpreter nobody can come
    meanwhile: one look is enough."""
    return {"SPINS": 1 << 40 if tensor.is_cuda else 1, **launch_options(tensor)}
