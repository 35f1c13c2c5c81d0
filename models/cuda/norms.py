"""Row-wise kernels: RMS norm, with and without the residual sum, and the SwiGLU product.

Statistics are float32; a row's result depends on that row alone.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.overlap import after_previous, overlap


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    width,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    gain = tl.load(weight + column, mask=inside, other=0.0)  # nobody writes it
    after_previous(PDL)
    value = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        added = value.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        # The sum is rounded to the stored type first: the norm is of what the next layer reads.
        value = added.to(out.dtype.element_ty)
        tl.store(total + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = wide * scale * gain
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] (any of float32, bfloat16), weight float32 [H] -> norm of each row, like x."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch_norm(x, x, weight, out, out, eps, add=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), all [T, H] in one dtype, weight float32 [H]."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, residual, weight, out, total, eps, add=True)
    return out, total


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    add: bool,
) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    if not rows:
        return
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        width,
        eps,
        add,
        block,
        num_warps=_warps(block),
        **overlap(x),
    )


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2I] -> silu(first half) * second half, [T, I], rounded once."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _silu_mul_kernel[(rows, triton.cdiv(width, block))](
            gate_up, out, width, block, num_warps=4, **overlap(gate_up)
        )
    return out


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8
