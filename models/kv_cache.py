"""Paged key/value memory of one model shard."""

from __future__ import annotations

import math
import mmap

import torch


class KVCache:
    """K and V of every layer, in blocks; which sequence owns which block is the scheduler's.

    Attributes:
        keys, values: per layer, [num_blocks, block_size, kv_heads, head_dim].
    """

    __slots__ = ("block_size", "keys", "num_blocks", "values")

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, block_size, kv_heads, head_dim)
        # Zeros, not empty: a masked key still enters a product, and NaN times zero is NaN.
        self.keys = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))


def _zeros(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """On a CPU, blocks take memory when they are first written, not before."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    # Private pages come zeroed from the kernel; the tensor keeps the mapping alive.
    pages = mmap.mmap(
        -1, max(1, count) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)


def bytes_per_block(
    num_layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes one block takes over all layers, K and V together."""
    return 2 * num_layers * block_size * kv_heads * head_dim * dtype.itemsize
