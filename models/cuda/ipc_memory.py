"""GPU memory that several processes map, and host memory that a GPU maps.

Plain ``cudaMalloc``, outside torch's allocator, whose blocks cannot be shared one by one (and not
at all with expandable segments). The CUDA runtime is the one torch has loaded. Errors are
ResourceError with the call's name and CUDA's own text.
"""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ipc.errors import ResourceError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_PORTABLE_MAPPED = 3
_PAGE = 4096
_COPY_ANY = 4  # cudaMemcpyDefault


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@lru_cache
def _runtime() -> Any:
    """The loaded libcudart. Raises ResourceError without one."""
    if not torch.cuda.is_available():
        raise ResourceError("no CUDA device")
    torch.cuda.init()
    loaded = re.findall(r"\S*libcudart[^\s/]*\.so\S*", Path("/proc/self/maps").read_text())
    if not loaded:
        raise ResourceError("torch has loaded no CUDA runtime library")
    library = ctypes.CDLL(loaded[0])
    library.cudaGetErrorString.restype = ctypes.c_char_p
    library.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, _IpcHandle, ctypes.c_uint]
    return library


def _call(name: str, *args: Any) -> None:
    library = _runtime()
    status = getattr(library, name)(*args)
    if status:
        library.cudaGetLastError()  # or torch would meet it at its next call
        text = library.cudaGetErrorString(status).decode()
        raise ResourceError(f"{name}: {text} ({status})")


class DeviceMemory:
    """Words of device memory, this process's own or another's.

    Triton kernels take it as a pointer to int64.

    Attributes:
        device: the GPU through which this process uses it.
        nbytes: its size.
    """

    dtype = torch.int64

    def __init__(self, address: int, nbytes: int, device: torch.device, owned: bool) -> None:
        """Use ``allocate`` or ``open``."""
        self._address, self._owned = address, owned
        self.nbytes, self.device = nbytes, device

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> DeviceMemory:
        """Zeroed memory of this process. Raises ResourceError."""
        with torch.cuda.device(device):
            pointer = ctypes.c_void_p()
            _call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            memory = cls(pointer.value or 0, nbytes, device, owned=True)
            _call("cudaMemset", pointer, 0, ctypes.c_size_t(nbytes))
            torch.cuda.synchronize()
        return memory

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
        """Map another process's memory for kernels on ``device``.

        Raises ResourceError, as where the two GPUs cannot reach each other.
        """
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the context, if there is none yet
            pointer = ctypes.c_void_p()
            packed = _IpcHandle.from_buffer_copy(handle)
            _call("cudaIpcOpenMemHandle", ctypes.byref(pointer), packed, _LAZY_PEER_ACCESS)
        return cls(pointer.value or 0, nbytes, device, owned=False)

    def handle(self) -> bytes:
        """What ``open`` wants in another process. Raises ResourceError where IPC does not work."""
        packed = _IpcHandle()
        with torch.cuda.device(self.device):
            _call("cudaIpcGetMemHandle", ctypes.byref(packed), ctypes.c_void_p(self._address))
        return bytes(memoryview(packed))

    def data_ptr(self) -> int:
        """The address kernels use."""
        return self._address

    def write(self, words: npt.NDArray[np.int64], at: int = 0) -> None:
        """Copy words to word ``at`` on; returns when they are there. Raises ResourceError."""
        self._copy(self._address + 8 * at, words.ctypes.data, words.nbytes)

    def read(self, count: int, at: int = 0) -> npt.NDArray[np.int64]:
        """``count`` words from word ``at`` on. Raises ResourceError."""
        words = np.zeros(count, np.int64)
        self._copy(words.ctypes.data, self._address + 8 * at, words.nbytes)
        return words

    def copy_from(self, tensor: torch.Tensor) -> None:
        """Copy a tensor's bytes, from whatever device, to its beginning; returns when they are
        there. Raises ResourceError."""
        tensor = tensor.contiguous()
        self._copy(self._address, tensor.data_ptr(), tensor.nbytes)

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        with torch.cuda.device(self.device):
            size = ctypes.c_size_t(nbytes)
            where, what = ctypes.c_void_p(to), ctypes.c_void_p(source)
            _call("cudaMemcpy", where, what, size, _COPY_ANY)
            torch.cuda.synchronize()

    def close(self) -> None:
        """Free or unmap it; no kernel may use it any more. Idempotent."""
        address, self._address = self._address, 0
        if address:
            with torch.cuda.device(self.device):
                pointer = ctypes.c_void_p(address)
                _call("cudaFree" if self._owned else "cudaIpcCloseMemHandle", pointer)


def register_host(words: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Let the GPU read and write host memory, as a shared mapping; returns it as a tensor.

    ``words`` must begin a page and stay mapped. Raises ResourceError.
    """
    address = words.ctypes.data
    if address % _PAGE:
        raise ResourceError("host memory to register must begin a page")
    with torch.cuda.device(device):
        pointer = ctypes.c_void_p(address)
        size = ctypes.c_size_t(words.nbytes)
        _call("cudaHostRegister", pointer, size, _PORTABLE_MAPPED)
        mapped = ctypes.c_void_p()
        _call("cudaHostGetDevicePointer", ctypes.byref(mapped), pointer, 0)
    if mapped.value != address:
        raise ResourceError("the GPU sees registered host memory at another address")
    return torch.from_numpy(words)


def unregister_host(words: npt.NDArray[np.int64]) -> None:
    """Undo ``register_host``. Raises ResourceError."""
    _call("cudaHostUnregister", ctypes.c_void_p(words.ctypes.data))


def device_uuid(device: torch.device) -> str:
    """The GPU's own name, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)
