"""Products of a few rows with a large matrix, fused with what stands before and after them.

At one to some tens of rows a decoder layer is bound by reading its weights, and in a small model by
the boundaries between kernels. So the norm before a product, the gating and the residual sum after
it run in the product's own kernel: five products and attention make a layer.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.cuda.overlap import after_previous, overlap

MAX_ROWS = 64
ONCE = 1536
"""Columns up to which one row's product takes a row of the matrix at once."""


@triton.jit
def _part(x, norm, squares, m, in_m, k, in_k, K, NORM: tl.constexpr):
    """Some columns of the rows, times the norm's weight if there is one; sums of squares."""
    part = tl.load(x + m[:, None] * K + k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
    if NORM:
        wide = part.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        wide *= tl.load(norm + k, mask=in_k, other=0.0)[None, :]
        part = wide.to(part.dtype)
    return part, squares


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
    """Several rows on the tensor cores, 16 or more padded. The first weights are fetched while
    the kernel before this one still runs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    in_n, in_m = n < N, m < rows
    weight_at = weight + n.to(tl.int64)[None, :] * K
    gap = N.to(tl.int64) * K  # from a gate's row to its up's
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    k = tl.arange(0, BLOCK_K)
    in_k = k < K
    mask = in_k[:, None] & in_n[None, :]
    w = tl.load(weight_at + k[:, None], mask=mask, other=0.0)
    up_w = w
    if GATED:
        up_w = tl.load(weight_at + gap + k[:, None], mask=mask, other=0.0)
    after_previous(PDL)
    part, squares = _part(x, norm, squares, m, in_m, k, in_k, K, NORM)
    acc = tl.dot(part, w, input_precision="ieee")
    if GATED:
        up = tl.dot(part, up_w, input_precision="ieee")
    for first in range(BLOCK_K, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        in_k = k < K
        part, squares = _part(x, norm, squares, m, in_m, k, in_k, K, NORM)
        mask = in_k[:, None] & in_n[None, :]
        w = tl.load(weight_at + k[:, None], mask=mask, other=0.0)
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
    """One row, by multiply and add: nothing but the weights' stream counts. A block's weights are
    fetched while the one before it is used, the first (with ``ONCE``, all that K has) while the
    kernel before this one still runs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    weight_at = weight + n.to(tl.int64)[:, None] * K
    gap = N.to(tl.int64) * K  # from a gate's row to its up's
    k = tl.arange(0, BLOCK_K)
    mask = in_n[:, None] & (k < K)[None, :]
    ahead = tl.load(weight_at + k[None, :], mask=mask, other=0.0)
    up_ahead = ahead
    if GATED:
        up_ahead = tl.load(weight_at + gap + k[None, :], mask=mask, other=0.0)
    after_previous(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        in_k = k < K
        part = tl.load(x + k, mask=in_k, other=0.0).to(tl.float32)
        w, up_w = ahead, up_ahead
        if not ONCE:
            following = k + BLOCK_K
            mask = in_n[:, None] & (following < K)[None, :]
            ahead = tl.load(weight_at + following[None, :], mask=mask, other=0.0)
            if GATED:
                up_ahead = tl.load(weight_at + gap + following[None, :], mask=mask, other=0.0)
        if NORM:
            squares += part * part
            part *= tl.load(norm + k, mask=in_k, other=0.0)
            part = part.to(w.dtype).to(tl.float32)
        acc += w.to(tl.float32) * part[None, :]
        if GATED:
            up += up_w.to(tl.float32) * part[None, :]
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


class Tiling(NamedTuple):
    """How a product is cut: a program's rows of the matrix, the columns it takes at a time, its
    warps, and (for several rows of x) how many loads are under way."""

    rows: int
    columns: int
    warps: int
    stages: int = 1


def row_tiling(n: int, k: int, gated: bool) -> Tiling:
    """What an H200 does best for a matrix of ``n`` rows (pairs of rows, if gated) of ``k``."""
    if k > ONCE:
        return Tiling(4, 1024, 4)
    columns, few = triton.next_power_of_2(k), 1 if gated else 2
    rows = few * (4096 // columns) if k * n >= 1 << 22 else few
    return Tiling(max(1, min(rows, 16)), columns, 4)


def rows_tiling(block_m: int, k: int, gated: bool, wide: bool) -> Tiling:
    """The same for several rows of x, padded to ``block_m``; ``wide``: in float32."""
    size = 2 if wide else 1
    columns = max(32, min(256 // size, triton.next_power_of_2(k)))
    if block_m > 32:
        columns = min(columns, 128 // size)
    return Tiling(16, columns, 4 if block_m > 16 else 2, 3 if wide or gated else 4)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """x [T, K] (1 <= T <= MAX_ROWS) times weight [N, K] -> [T, N] in x's dtype.

    Args:
        bias: [N]; not with ``gated``.
        norm: float32 [K]: the product is of RMS norm(x) with this weight and ``eps``.
        gated: ``weight`` is [2N, K], gate over up; the result is silu(gate) * up.
        residual: [T, N], added to the rounded product.
        out: [T, N] to write to.
        tiling: None = ``row_tiling``'s or ``rows_tiling``'s.

    ``x``, ``weight`` and ``residual`` have one dtype. Raises ValueError for shapes beyond these.
    """
    x = x.contiguous()
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if not 1 <= rows <= MAX_ROWS or weight.shape[1] != k or (gated and bias is not None):
        raise ValueError(f"skinny_linear: x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    if out is None:
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
        cut = tiling or row_tiling(n, k, gated)
        _row_kernel[(triton.cdiv(n, cut.rows),)](
            *tensors,
            n,
            k,
            eps,
            cut.rows,
            cut.columns,
            *flags,
            k <= cut.columns,
            num_warps=cut.warps,
            **overlap(x),
        )
        return out
    block_m = max(16, triton.next_power_of_2(rows))
    cut = tiling or rows_tiling(block_m, k, gated, x.dtype == torch.float32)
    _rows_kernel[(triton.cdiv(n, cut.rows),)](
        *tensors,
        rows,
        n,
        k,
        eps,
        block_m,
        cut.rows,
        cut.columns,
        *flags,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **overlap(x),
    )
    return out
