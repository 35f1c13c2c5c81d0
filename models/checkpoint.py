"""Where weights come from: safetensors files, or random numbers of the right shape."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ipc.errors import ModelError
from models.folder import INDEX_FILE, SINGLE_FILE, weight_map
from models.sharding import Span

INIT_STD = 0.02
_STORED = (torch.float32, torch.bfloat16, torch.float16)


class WeightSource(Protocol):
    """Gives slices of named tensors, in their stored dtype, on the device it was made for."""

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> torch.Tensor:
        """The given rows and columns (None = all) of tensor ``name``, whose full shape must be
        ``shape``. Raises ModelError naming the tensor and the file."""


class SafetensorsSource:
    """``model.safetensors``, or the files ``model.safetensors.index.json`` lists."""

    def __init__(self, folder: str | Path, device: torch.device) -> None:
        self._folder = Path(folder)
        self._device = str(device)
        self._open: dict[str, Any] = {}
        self._files = self._list_tensors()

    @property
    def names(self) -> list[str]:
        """Every tensor there is."""
        return list(self._files)

    def path_of(self, name: str) -> Path:
        """The file that holds tensor ``name``."""
        return self._folder / self._files[name]

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> torch.Tensor:
        if name not in self._files:
            raise ModelError(f"weight {name} is missing in {self._folder}")
        path = self.path_of(name)
        try:
            view = self._handle(self._files[name]).get_slice(name)
            found = tuple(view.get_shape())
            if found != shape:
                raise ModelError(f"weight {name} in {path} has shape {found}, expected {shape}")
            r = slice(rows.start, rows.stop) if rows else slice(None)
            tensor = view[r, columns.start : columns.stop] if columns else view[r]
        except SafetensorError as error:
            raise ModelError(f"weight {name} in {path} cannot be read: {error}") from None
        if tensor.dtype not in _STORED:
            raise ModelError(f"weight {name} in {path} has unsupported dtype {tensor.dtype}")
        return tensor

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self._folder / file
            try:
                self._open[file] = safe_open(path, framework="pt", device=self._device)
            except FileNotFoundError:
                raise ModelError(f"{path}: no such file") from None
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: not a readable safetensors file: {error}") from None
        return self._open[file]

    def _list_tensors(self) -> dict[str, str]:
        files = weight_map(self._folder)
        if files is not None:
            return files
        if not (self._folder / SINGLE_FILE).is_file():
            raise ModelError(f"{self._folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        return dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)


class RandomSource:
    """Normal weights of standard deviation 0.02, norms of one, biases of zero, by seed.

    A tensor depends on the seed and its name alone, so every tensor-parallel split of the model is
    the same model. For timing shapes whose weights are not at hand.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._dtype = dtype
        self._device = device
        self._seed = seed

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif name.endswith(".bias"):
            tensor.zero_()
        else:
            generator = torch.Generator(self._device)
            # torch's CPU generator takes only 32 bits of a seed, so both go into one hash.
            generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
            tensor.normal_(0.0, INIT_STD, generator=generator)
        if rows is not None:
            tensor = tensor[rows.start : rows.stop]
        if columns is not None:
            tensor = tensor[:, columns.start : columns.stop]
        if tensor.shape == shape:  # the whole of it: a copy would double the largest matrices
            return tensor
        return tensor.clone(memory_format=torch.contiguous_format)
