"""Inputs of a graph: one pinned host buffer, one device buffer, one copy a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

_ALIGN = 16  # bytes; Triton's widest access


class Field(NamedTuple):
    """One input: its shape and dtype (int64, int32 or float32)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Staging:
    """Named arrays on the host and the tensors of the same bytes on the device.

    Attributes:
        host: numpy views to write inputs to. They may be written again once ``wait`` returned.
        tensors: the device's, at fixed addresses.
        host_words, words: int64 [n], all of the host's and of the device's bytes.
    """

    def __init__(self, fields: Sequence[Field], device: torch.device) -> None:
        starts, size = [], 0
        for _, shape, dtype in fields:
            starts.append(size)
            count = int(np.prod(shape))
            size += -(-count * dtype.itemsize // _ALIGN) * _ALIGN
        pinned = device.type == "cuda"
        self._bytes = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if pinned else None
        self.host_words: np.ndarray = self._bytes.view(torch.int64).numpy()
        self.words = self._device_bytes.view(torch.int64)
        self.host: dict[str, np.ndarray] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._pairs = {"": (self._device_bytes, self._bytes)}
        for start, (name, shape, dtype) in zip(starts, fields, strict=True):
            stop = start + int(np.prod(shape)) * dtype.itemsize
            self._pairs[name] = (self._device_bytes[start:stop], self._bytes[start:stop])
            self.host[name] = self._bytes[start:stop].view(dtype).view(shape).numpy()
            self.tensors[name] = self._device_bytes[start:stop].view(dtype).view(shape)

    def wait(self) -> None:
        """Return when the last copy has read the host arrays."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, name: str = "") -> None:
        """Queue the copy to the device on the current stream; with ``name`` of one field only."""
        to, source = self._pairs[name]
        to.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Readback:
    """Results of a step on their way to the host.

    ``fetch`` queues a copy of a device tensor to pinned memory; after ``wait`` the arrays it
    returned are filled. They are overwritten by the next ``fetch`` of the same name.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def fetch(self, name: str, tensor: torch.Tensor) -> np.ndarray:
        """The array that will hold ``tensor``, of its shape and dtype."""
        count = tensor.numel()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count or buffer.dtype != tensor.dtype:
            pinned = self._device.type == "cuda"
            buffer = self._buffers[name] = torch.empty(count, dtype=tensor.dtype, pin_memory=pinned)
        view = buffer[:count].view(tensor.shape)
        view.copy_(tensor, non_blocking=True)
        return view.numpy()

    def wait(self) -> None:
        """Return when everything queued on the current stream is done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
