"""Products of one to some tens of rows with a large matrix, on the tensor cores.

They are bound by reading the matrix. So the matrix is the left operand: its tiles of 16 or 64 rows
go from memory to the tensor cores by asynchronous copies, several under way, and the few rows of x
are the padded other side. A result depends neither on the number of rows nor on the others: tiles
are chosen by the matrix alone, wherever that changes the order of sums. A token thus gets the same
from a decoding step as from a verification step.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.cuda.overlap import after_previous, overlap, prefetch

MAX_ROWS = 64
MANY_TILES = 128
"""Tiles of 64 rows from which on each keeps one of an H200's multiprocessors busy."""
FEW_TILES = 160
"""Tiles of 16 rows below which one is shared among several warps, unless it is short."""
SHORT, LONG = 1024, 8192
"""Columns up to which a tile of 16 rows is not shared, and from which on it is in any case."""


@triton.jit
def _matrix_rows(N, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The program's rows of the matrix, gates before their ups; the last one for those beyond."""
    i = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        n = tl.minimum(tl.program_id(0) * HALF + i % HALF, N - 1)
        row = n + (i // HALF) * N
    else:
        row = tl.minimum(tl.program_id(0) * BLOCK_N + i, N - 1)
    return row.to(tl.int64)


@triton.jit
def _finish(
    acc,
    bias,
    residual,
    out,
    rows,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Store the float32 products [BLOCK_N, BLOCK_M] of a program, transposed."""
    WIDE: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    n = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    m = tl.arange(0, BLOCK_M)
    in_n = n < N
    if GATED:
        pair = tl.permute(tl.reshape(acc, (2, WIDE, BLOCK_M)), (1, 2, 0))
        gate, up = tl.split(pair)
        acc = gate / (1.0 + tl.exp(-gate)) * up
    if BIAS:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    at = m[None, :] * N + n[:, None]
    mask = (m < rows)[None, :] & in_n[:, None]
    value = acc.to(out.dtype.element_ty)
    if RESIDUAL:
        added = value.to(tl.float32) + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        value = added.to(out.dtype.element_ty)
    tl.store(out + at, value, mask=mask)


@triton.jit
def _tile_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program multiplies BLOCK_N rows of the matrix, all columns in turn."""
    weight_at = weight + _matrix_rows(N, GATED, BLOCK_N)[:, None] * K
    if AHEAD > 0:
        prefetch(weight_at, K, AHEAD, PDL)
    after_previous(PDL)
    m = tl.arange(0, BLOCK_M)
    in_m = m < rows
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        in_k = k < K
        w = tl.load(weight_at + k[None, :], mask=in_k[None, :], other=0.0)
        part = tl.load(
            x + m[None, :] * K + k[:, None], mask=in_m[None, :] & in_k[:, None], other=0.0
        )
        acc = tl.dot(w, part, acc, input_precision="ieee")
    _finish(acc, bias, residual, out, rows, N, BLOCK_M, BLOCK_N, GATED, BIAS, RESIDUAL)


@triton.jit
def _shared_tile_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    SHARES: tl.constexpr,
):
    """The same, each warp taking one of SHARES parts of the columns; their sums are added last."""
    row = _matrix_rows(N, GATED, BLOCK_N)
    if AHEAD > 0:
        prefetch(weight + row[:, None] * K, K, AHEAD, PDL)
    after_previous(PDL)
    m = tl.arange(0, BLOCK_M)
    in_m = m < rows
    column = tl.arange(0, SHARES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    weight_at = weight + row[None, :, None] * K
    acc = tl.zeros((SHARES, BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, K, BLOCK_K * SHARES):
        k = first + column
        in_k = k < K
        w = tl.load(weight_at + k[:, None, :], mask=in_k[:, None, :], other=0.0)
        mask = in_m[None, None, :] & in_k[:, :, None]
        part = tl.load(x + m[None, None, :] * K + k[:, :, None], mask=mask, other=0.0)
        acc = tl.dot(w, part, acc, input_precision="ieee")
    total = tl.sum(acc, axis=0)
    _finish(total, bias, residual, out, rows, N, BLOCK_M, BLOCK_N, GATED, BIAS, RESIDUAL)


class Tiling(NamedTuple):
    """How a product is cut.

    Attributes:
        rows: of the matrix, of one program; half gates, half ups if gated.
        columns: taken at a time, of each share.
        warps: of a program.
        stages: blocks of columns under way.
        shares: warps that split the columns between them.
        ahead: columns of each row fetched to the L2 cache while the kernel before still runs, a
            multiple of 64 and a power of two, or 0.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    shares: int = 1
    ahead: int = 256


def tiling(n: int, k: int, block_m: int, gated: bool, dtype: torch.dtype) -> Tiling:
    """What an H200 does best for a matrix of ``n`` rows (pairs, if gated) of ``k`` and rows of x
    padded to ``block_m``. Nothing but depth and columns in one block depends on ``block_m``."""
    if dtype == torch.float32:
        return Tiling(32 if gated else 16, 64 if block_m > 32 else 128, 4, 3, ahead=0)
    stages = 4 if block_m <= 32 else 2
    if gated or triton.cdiv(n, 64) >= MANY_TILES:
        return Tiling(64, 128, 4, stages)
    few = triton.cdiv(n, 16) < FEW_TILES
    if k >= LONG or (few and k > SHORT):
        return Tiling(16, 128, 4, stages, shares=4)
    return Tiling(16, 256, 2, stages) if few else Tiling(32, 256, 4, stages)


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    cut: Tiling | None = None,
) -> torch.Tensor:
    """x [T, K] (1 <= T <= MAX_ROWS) times weight [N, K] -> [T, N] in x's dtype.

    Args:
        bias: [N]; not with ``gated``.
        gated: ``weight`` is [2N, K], gate over up; the result is silu(gate) * up.
        residual: [T, N], added to the rounded product.
        out: [T, N], contiguous, to write to.
        cut: None = ``tiling``'s.

    ``x``, ``weight`` and ``residual`` have one dtype; ``weight`` is contiguous. Raises ValueError
    for shapes beyond these.
    """
    x = x.contiguous()
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if not 1 <= rows <= MAX_ROWS or weight.shape[1] != k or (gated and bias is not None):
        raise ValueError(f"few_rows_linear: x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    if out is None:
        out = x.new_empty((rows, n))
    block_m = max(16, triton.next_power_of_2(rows))
    cut = cut or tiling(n, k, block_m, gated, x.dtype)
    tensors = (
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual.contiguous(),
        out,
    )
    grid = (triton.cdiv(n, cut.rows // 2 if gated else cut.rows),)
    shape = (rows, n, k, block_m, cut.rows, cut.columns, cut.ahead)
    flags = (gated, bias is not None, residual is not None)
    launch = {"num_warps": cut.warps, "num_stages": cut.stages, **overlap(x)}
    if cut.shares > 1:
        _shared_tile_kernel[grid](*tensors, *shape, *flags, SHARES=cut.shares, **launch)
    else:
        _tile_kernel[grid](*tensors, *shape, *flags, **launch)
    return out
