"""One implementation of the layer operations per kind of device; ``make_backend`` picks."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ipc.errors import ConfigError
from models.backends.base import AttentionKind, Backend
from models.backends.reference import ReferenceBackend

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_backend(
    name: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    attention: AttentionKind = "auto",
    exact: bool = True,
) -> Backend:
    """The backend called ``name`` for arithmetic in ``dtype``.

    "reference", "native", "cuda" or "auto": the native kernels on a CPU in float32 where they can
    be built, the CUDA kernels on a GPU where Triton is installed, plain torch elsewhere, whose
    ``fallback`` then says why. Not ``exact``: a token of a decoding step and the same one of a step
    of several may differ by rounding, where that is faster, as it may in a draft. Raises
    ConfigError for a name, device, dtype or ``attention`` (see CudaBackend) it cannot serve, and
    models.native's NativeUnavailable if "native" is asked for and cannot be built.
    """
    device = torch.device(device)
    wanted = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if wanted is None or wanted not in DTYPES.values():
        raise ConfigError("dtype", f"must be float32 or bfloat16, got {dtype}")
    if name not in ("auto", "reference", "native", "cuda"):
        raise ConfigError("backend", f"must be auto, reference, native or cuda, got {name!r}")
    if attention != "auto" and (device.type != "cuda" or name == "reference"):
        raise ConfigError("attention", f"{attention} needs the cuda backend on a GPU")
    fallback = ""
    fits = device.type == "cpu" and wanted == torch.float32
    if name == "native" and not fits:
        raise ConfigError(
            "backend", f"native computes in float32 on a CPU, not {wanted} on {device}"
        )
    if name == "native" or (name == "auto" and fits):
        from models.backends.native import NativeBackend
        from models.native import NativeUnavailable

        try:
            return NativeBackend()
        except NativeUnavailable as error:
            if name == "native":
                raise
            fallback = str(error)
    if name == "cuda" and device.type != "cuda":
        raise ConfigError("backend", f"cuda does not compute on {device}")
    if name == "cuda" or (name == "auto" and device.type == "cuda"):
        if find_spec("triton") is not None:
            from models.backends.cuda import NARROW, CudaBackend, CudaOptions

            options = CudaOptions(fused_width=0 if exact else NARROW)
            return CudaBackend(device, wanted, options, attention)
        if name == "cuda":
            raise ConfigError("backend", "cuda needs Triton: pip install 'ssd-pipe[cuda]'")
        fallback = "CUDA kernels: Triton is not installed"
    return ReferenceBackend(device, wanted, fallback)
