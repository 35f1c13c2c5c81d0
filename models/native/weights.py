"""Packed weight matrices and the memory they live in."""

from __future__ import annotations

import ctypes

import torch

from models.native.library import CPacked, dense, library

_PAGE = 2 << 20
_CHUNK = 32 << 20


class PackedWeight:
    """A [n, k] matrix in panels of 16 outputs, bf16 or float32; the only copy kernels need.

    Attributes:
        n, k: outputs and inputs.
        dtype: stored dtype.
        address: address of the C struct, as the kernels take it.
    """

    __slots__ = ("_storage", "_struct", "address", "dtype", "k", "n")

    def __init__(self, weight: torch.Tensor, arena: Arena) -> None:
        self.dtype = weight.dtype
        self.n, self.k = weight.shape
        if weight.stride(1) != 1 or weight.stride(0) < self.k:
            weight = weight.contiguous()
        is_bf16 = weight.dtype == torch.bfloat16
        padded = (self.n + 15) // 16 * 16
        self._storage = arena.take(padded * self.k * weight.element_size())
        self._struct = CPacked(self._storage.data_ptr(), self.n, self.k, is_bf16)
        self.address = ctypes.addressof(self._struct)
        library().ssd_pack(
            weight.data_ptr(),
            weight.stride(0),
            self.n,
            self.k,
            is_bf16,
            self._storage.data_ptr(),
            torch.get_num_threads(),
        )

    def first(self, n: int) -> PackedWeight:
        """The matrix of the first ``n`` outputs, sharing memory: a head over a part of the
        vocabulary, say. Raises ValueError unless 1 <= n <= self.n."""
        if not 1 <= n <= self.n:
            raise ValueError(f"n must be 1..{self.n}, got {n}")
        part = object.__new__(PackedWeight)
        part.dtype, part.n, part.k, part._storage = self.dtype, n, self.k, self._storage
        part._struct = CPacked(self._storage.data_ptr(), n, self.k, self._struct.bf16)
        part.address = ctypes.addressof(part._struct)
        return part

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix for int64 [T], float32 [T, k]; zeros for indices out of range."""
        index = dense(index, torch.int64)
        out = torch.empty((index.shape[0], self.k))
        library().ssd_unpack_rows(self.address, index.data_ptr(), index.shape[0], out.data_ptr())
        return out


class Arena:
    """Hands out 64-byte aligned memory from large chunks on huge pages, so that streaming
    through the weights of a layer costs few TLB misses. Memory lives as long as what was taken."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], not initialised."""
        rounded = (size + 63) // 64 * 64
        if rounded > self._chunk.numel():
            self._chunk = self._map(max(rounded, _CHUNK if rounded < _CHUNK // 2 else rounded))
        piece = self._chunk[:size]
        self._chunk = self._chunk[rounded:]
        return piece

    def _map(self, size: int) -> torch.Tensor:
        whole = (size + _PAGE - 1) // _PAGE * _PAGE
        memory = torch.empty(whole + _PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % _PAGE
        library().ssd_huge_pages(memory.data_ptr() + start, whole)
        return memory[start : start + whole]
