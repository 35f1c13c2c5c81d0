"""Products of a few rows with a large matrix, fused with what stands before and after them.

At one to some tens of rows a decoder layer is bound by reading its weights, and in a small model by
the boundaries between kernels. So the norm before a product, the gating and the residual sum after
it run in the product's own kernel: five products and attention make a layer.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.cuda.overlap import after_previous, overlap

MAX_ROWS = 64


@triton.jit
def _rows_kernel(
    x,
    weight,
    bias,
    norm,
    residual,
    out,
    rows,
    N,
    K,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Several rows on the tensor cores, 16 or more padded."""
    after_previous(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    in_n, in_m = n < N, m < rows
    weight_at = weight + n.to(tl.int64)[None, :] * K
    gap = N.to(tl.int64) * K  # from a gate's row to its up's
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        in_k = k < K
        part = tl.load(
            x + m[:, None] * K + k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0
        )
        mask = in_k[:, None] & in_n[None, :]
        w = tl.load(weight_at + k[:, None], mask=mask, other=0.0)
        if NORM:
            wide = part.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            wide *= tl.load(norm + k, mask=in_k, other=0.0)[None, :]
            part = wide.to(w.dtype)
        acc = tl.dot(part, w, acc, input_precision="ieee")
        if GATED:
            w = tl.load(weight_at + gap + k[:, None], mask=mask, other=0.0)
            up = tl.dot(part, w, up, input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(squares / K + eps)[:, None]
        acc *= scale
        up *= scale
    if BIAS:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = m[:, None] * N + n[None, :]
    mask = in_m[:, None] & in_n[None, :]
    value = acc.to(out.dtype.element_ty)
    if RESIDUAL:
        added = value.to(tl.float32) + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        value = added.to(out.dtype.element_ty)
    tl.store(out + at, value, mask=mask)


@triton.jit
def _row_kernel(
    x,
    weight,
    bias,
    norm,
    residual,
    out,
    N,
    K,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, by multiply and add: nothing but the weights' stream counts. ``ONCE``: K fits a
    block, and the weights are fetched while the kernel before this one still runs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    weight_at = weight + n.to(tl.int64)[:, None] * K
    gap = N.to(tl.int64) * K
    if ONCE:
        k_once = tl.arange(0, BLOCK_K)
        mask_once = in_n[:, None] & (k_once < K)[None, :]
        w_once = tl.load(weight_at + k_once[None, :], mask=mask_once, other=0.0)
        up_once = w_once
        if GATED:
            up_once = tl.load(weight_at + gap + k_once[None, :], mask=mask_once, other=0.0)
    after_previous(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        in_k = k < K
        part = tl.load(x + k, mask=in_k, other=0.0).to(tl.float32)
        mask = in_n[:, None] & in_k[None, :]
        if ONCE:  # noqa: SIM108 (decided at compile time)
            w = w_once
        else:
            w = tl.load(weight_at + k[None, :], mask=mask, other=0.0)
        if NORM:
            squares += part * part
            part *= tl.load(norm + k, mask=in_k, other=0.0)
            part = part.to(w.dtype).to(tl.float32)
        acc += w.to(tl.float32) * part[None, :]
        if GATED:
            if ONCE:  # noqa: SIM108
                w = up_once
            else:
                w = tl.load(weight_at + gap + k[None, :], mask=mask, other=0.0)
            up += w.to(tl.float32) * part[None, :]
    result = tl.sum(acc, axis=1)
    gain = tl.sum(up, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        result *= scale
        gain *= scale
    if BIAS:
        result += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * gain
    value = result.to(out.dtype.element_ty)
    if RESIDUAL:
        added = value.to(tl.float32) + tl.load(residual + n, mask=in_n, other=0.0).to(tl.float32)
        value = added.to(out.dtype.element_ty)
    tl.store(out + n, value, mask=in_n)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] (1 <= T <= MAX_ROWS) times weight [N, K] -> [T, N] in x's dtype.

    Args:
        bias: [N]; not with ``gated``.
        norm: float32 [K]: the product is of RMS norm(x) with this weight and ``eps``.
        gated: ``weight`` is [2N, K], gate over up; the result is silu(gate) * up.
        residual: [T, N], added to the rounded product.

    ``x``, ``weight`` and ``residual`` have one dtype. Raises ValueError for shapes beyond these.
    """
    x = x.contiguous()
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if not 1 <= rows <= MAX_ROWS or weight.shape[1] != k or (gated and bias is not None):
        raise ValueError(f"skinny_linear: x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    out = x.new_empty((rows, n))
    unused = x
    tensors = (
        x,
        weight,
        unused if bias is None else bias,
        unused if norm is None else norm,
        unused if residual is None else residual.contiguous(),
        out,
    )
    flags = (norm is not None, gated, bias is not None, residual is not None)
    if rows == 1:
        once = k <= 2048
        block_k = triton.next_power_of_2(k) if once else 1024
        block_n = (1 if gated else 2) * (4096 // block_k) if k * n >= 1 << 22 else 1
        block_n = max(1, min(block_n, 16))
        _row_kernel[(triton.cdiv(n, block_n),)](
            *tensors, n, k, eps, block_n, block_k, *flags, once, num_warps=4, **overlap(x)
        )
        return out
    wide = 2 if x.dtype == torch.float32 else 1
    block_m = max(16, triton.next_power_of_2(rows))
    block_k = max(32, min(256 // wide, triton.next_power_of_2(k)))
    if block_m > 32:
        block_k = min(block_k, 128 // wide)
    _rows_kernel[(triton.cdiv(n, 16),)](
        *tensors,
        rows,
        n,
        k,
        eps,
        block_m,
        16,
        block_k,
        *flags,
        num_warps=4 if block_m > 16 else 2,
        num_stages=4 if wide == 1 and not gated else 3,
        **overlap(x),
    )
    return out
