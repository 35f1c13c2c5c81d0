"""``load_model``: a folder and a few settings in, a ready Transformer out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from ipc.errors import ConfigError
from models.backends import DTYPES, make_backend
from models.backends.base import AttentionKind, Backend
from models.checkpoint import RandomSource, SafetensorsSource, WeightSource
from models.config import ModelConfig
from models.loader import build_transformer
from models.parallel import TensorParallel
from models.transformer import Transformer

LoadFormat = Literal["safetensors", "dummy"]


def resolve_device(device: str) -> torch.device:
    """The device; "auto" is the first CUDA one, or the CPU without any. Raises ConfigError."""
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError("device", f"must be auto, cpu, cuda or cuda:N, got {device!r}") from None
    if found.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"must be auto, cpu, cuda or cuda:N, got {device!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", f"{device}: this machine has {torch.cuda.device_count()} GPUs")
    return found


def resolve_dtype(dtype: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """Arithmetic; "auto" is float32 on a CPU, the checkpoint's on a GPU (float16 as bfloat16).

    Raises ConfigError for any other type.
    """
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" or config.dtype == "float32" else "bfloat16"
    if dtype not in DTYPES:
        raise ConfigError("dtype", f"must be auto, float32 or bfloat16, got {dtype!r}")
    return DTYPES[dtype]


def load_model(
    folder: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    backend: str | Backend = "auto",
    attention: AttentionKind = "auto",
    exact: bool = True,
    tp: TensorParallel | None = None,
    load_format: LoadFormat = "safetensors",
    seed: int = 0,
    max_positions: int = 0,
) -> Transformer:
    """Load the model of ``folder``, or this rank's shard of it.

    Args:
        dtype: arithmetic, "auto", "float32" or "bfloat16"; weights keep their stored dtype as far
            as the backend allows.
        backend: a name for ``make_backend``, or a backend, whose device and dtype then count.
        attention, exact: of a named backend, see ``make_backend``.
        tp: the tensor-parallel group, None = alone.
        load_format: "dummy" gives random weights of the config's shape, keyed by ``seed``.
        max_positions: positions that will be used, 0 = all the model has.

    Raises ModelError or ConfigError with one line that names the file, weight or setting.
    """
    config = ModelConfig.from_folder(folder)
    if max_positions > config.max_positions:
        raise ConfigError(
            "max_positions", f"{max_positions} is more than the model's {config.max_positions}"
        )
    if isinstance(backend, str):
        where = resolve_device(device)
        arithmetic = resolve_dtype(dtype, where, config)
        backend = make_backend(backend, where, arithmetic, attention, exact)
    source: WeightSource
    if load_format == "dummy":
        stored = DTYPES.get(config.dtype, torch.bfloat16)
        source = RandomSource(stored, backend.device, seed)
    else:
        source = SafetensorsSource(folder, backend.device)
    return build_transformer(config, source, backend, tp or TensorParallel(), max_positions)
