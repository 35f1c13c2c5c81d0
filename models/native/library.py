"""The compiled kernels as ctypes functions, with the structs they take."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from models.native.build import NativeUnavailable, built_library


class CPacked(ctypes.Structure):
    """struct Packed of gemm.h."""

    _fields_ = [("data", c_void_p), ("n", c_int64), ("k", c_int64), ("bf16", c_int64)]


class CHeads(ctypes.Structure):
    """struct Heads of layers.h."""

    _fields_ = [("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64)]


class CRotary(ctypes.Structure):
    """struct Rotary of layers.h."""

    _fields_ = [
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
    ]


class CBatch(ctypes.Structure):
    """struct Batch of attention.h."""

    _fields_ = [
        ("tokens", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("seqs", c_void_p),
        ("block_tables", c_void_p),
        ("table_width", c_int64),
        ("context_lens", c_void_p),
        ("suffix_slots", c_void_p),
        ("suffix_lens", c_void_p),
        ("suffix_width", c_int64),
        ("block_size", c_int64),
    ]


class CLayer(ctypes.Structure):
    """struct Layer of forward.cpp."""

    _fields_ = [
        (name, c_void_p)
        for name in (
            "input_norm",
            "qkv",
            "qkv_bias",
            "q_norm",
            "k_norm",
            "o",
            "o_bias",
            "post_norm",
            "gate_up",
            "gate_up_bias",
            "down",
            "down_bias",
            "k_cache",
            "v_cache",
        )
    ]


class CModel(ctypes.Structure):
    """struct Model of forward.cpp."""

    _fields_ = [
        ("layers", c_void_p),
        ("count", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("heads", CHeads),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
    ]


_P, _I, _F, _N = c_void_p, c_int64, c_float, c_int
_PROTOTYPES: dict[str, list[type]] = {
    "ssd_huge_pages": [_P, _I],
    "ssd_pack": [_P, _I, _I, _I, _I, _P, _N],
    "ssd_unpack_rows": [_P, _P, _I, _P],
    "ssd_linear": [_P, _P, _I, _I, _P, _P, _I, _P, _I, _N],
    "ssd_embed": [_P, _I, _I, _I, _P, _I, _P],
    "ssd_rms_norm": [_P, _I, _I, _I, _P, _F, _P, _N],
    "ssd_add_rms_norm": [_P, _I, _P, _I, _I, _I, _P, _F, _P, _P, _N],
    "ssd_silu_mul": [_P, _I, _I, _I, _P, _N],
    "ssd_rope_and_store": [_P, _I, _I, _P, _P, _P, _P, _P, _P, _P, _N],
    "ssd_attention": [_P, _P, _P, _P, _P, _F, _P, _N],
    "ssd_forward": [_P, _P, _P, _P, _I, _P, _P, _N],
    "ssd_gumbel_rows": [_P, _I, _I, _P, _N],
    "ssd_head_argmax": [_P, _P, _I, _I, _P, _P, _P, _P, _N],
    "ssd_noised_argmax": [_P, _I, _I, _I, _P, _P, _P, _P, _N],
    "ssd_noised_topk": [_P, _I, _I, _I, _I, _P, _P, _P, _P, _N],
}


@cache
def library() -> ctypes.CDLL:
    """The kernels, compiled if need be. Calls release the GIL. Raises NativeUnavailable.

    torch is imported first, so that its OpenMP runtime (the same soname) serves the kernels too
    and the process keeps one pool of threads.
    """
    path = built_library()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"native kernels: {path.name} does not load: {error}") from error
    for name, arguments in _PROTOTYPES.items():
        function = getattr(lib, name)
        function.argtypes = arguments
        function.restype = None
    lib.ssd_forward_scratch.argtypes = [_P, _I, _N]
    lib.ssd_forward_scratch.restype = c_int64
    return lib


def rows_of(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``x`` [M, N] itself if it is ``dtype`` with dense rows, else a copy that is."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def dense(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` itself if it is contiguous ``dtype``, else a copy that is."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.is_contiguous() else x.contiguous()


def pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
