"""The product of one row with a large matrix, fused with what stands before and after it.

A small model's decoding step is bound by the boundaries between kernels. So the norm before a
product, the gating and the residual sum after it run in the product's own kernel: five products and
attention make a layer.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.cuda.overlap import after_previous, overlap

ONCE = 1536
"""Columns up to which a row of the matrix is taken at once."""


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
    warps."""

    rows: int
    columns: int
    warps: int


def tiling(n: int, k: int, gated: bool) -> Tiling:
    """What an H200 does best for a matrix of ``n`` rows (pairs of rows, if gated) of ``k``."""
    if k > ONCE:
        return Tiling(4, 1024, 4)
    columns, few = triton.next_power_of_2(k), 1 if gated else 2
    rows = few * (4096 // columns) if k * n >= 1 << 22 else few
    return Tiling(max(1, min(rows, 16)), columns, 4)


def one_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [1, K] times weight [N, K] -> [1, N] in x's dtype.

    Args:
        bias: [N]; not with ``gated``.
        norm: float32 [K]: the product is of RMS norm(x) with this weight and ``eps``.
        gated: ``weight`` is [2N, K], gate over up; the result is silu(gate) * up.
        residual: [1, N], added to the rounded product.

    ``x``, ``weight`` and ``residual`` have one dtype. Raises ValueError for shapes beyond these.
    """
    x = x.contiguous()
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if rows != 1 or weight.shape[1] != k or (gated and bias is not None):
        raise ValueError(f"one_row_linear: x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    out = x.new_empty((1, n))
    cut = tiling(n, k, gated)
    _row_kernel[(triton.cdiv(n, cut.rows),)](
        x,
        weight,
        x if bias is None else bias,
        x if norm is None else norm,
        x if residual is None else residual.contiguous(),
        out,
        n,
        k,
        eps,
        cut.rows,
        cut.columns,
        norm is not None,
        gated,
        bias is not None,
        residual is not None,
        k <= cut.columns,
        num_warps=cut.warps,
        **overlap(x),
    )
    return out
