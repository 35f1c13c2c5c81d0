"""The kernels compile for a GPU, which the interpreter does not show; none is needed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets here", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from models.cuda import attention, candidates, mailbox, norms, one_row, products
from models.cuda.rounds import clock, gate, publish, settle

HOPPER = GPUTarget("cuda", 90, 32)
PRODUCT = {
    **dict.fromkeys(("x", "weight", "bias", "residual", "out"), "*bf16"),
    "norm": "*fp32",
    **dict.fromkeys(("rows", "N", "K"), "i32"),
    "eps": "fp32",
}
ATTENTION = {
    **dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16"),
    **dict.fromkeys(("part_acc", "part_peak", "part_total"), "*fp32"),
    **dict.fromkeys(("order", "tile_seq", "tile_start", "tile_length", "tables"), "*i32"),
    **dict.fromkeys(("context_lens", "suffix_slots", "suffix_lens"), "*i32"),
    "scale": "fp32",
    **dict.fromkeys(("num_tokens", "split_size", "suffix_split"), "i32"),
    **dict.fromkeys(("table_stride", "suffix_stride"), "i32"),
}
NORM = {
    **dict.fromkeys(("x", "residual", "out", "total"), "*bf16"),
    "weight": "*fp32",
    "width": "i32",
    "eps": "fp32",
}
BEST = {
    "logits": "*bf16",
    **dict.fromkeys(("keys", "kept", "entries", "tokens"), "*i64"),
    **dict.fromkeys(("inverse_temperature", "values"), "*fp32"),
    **dict.fromkeys(("vocab", "count", "n"), "i32"),
}
ROUND = {
    **dict.fromkeys(("tokens", "chosen", "starts", "state", "lease", "draws"), "*i64"),
    **dict.fromkeys(("table", "control", "mail", "records", "words"), "*i64"),
    **dict.fromkeys(("numbers", "homes", "hashes", "outcomes"), "*i64"),
    "counts": "*i32",
    **dict.fromkeys(("max_rows", "vocab", "depth"), "i32"),
}
MAIL = {**dict.fromkeys(("inputs", "words"), "*i64"), **dict.fromkeys(("number", "count"), "i32")}
LEASED = {"WIDTH": 6, "WIDTH_P": 8, "MAIL": 16, "SPINS": 1 << 40, "DEVICE": True}
CACHE = {"ENTRIES": 12, "ENTRIES_P": 16, "TABLE": 80}
SHAPE = {"HEADS": 8, "KV_HEADS": 2, "GROUP_P": 4, "DIM": 64, "DIM_P": 64, "PAGE": 16}
TILE = {"WIDTH": 4, "ROWS": 16, "BLOCK_N": 64, "ORDERED": True}
REDUCE = {"HEADS": 8, "DIM": 64, "DIM_P": 64, "CHUNK": 16}
EPILOGUE = {"NORM": True, "BIAS": False, "RESIDUAL": True, "GATED": True}
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 128, "AHEAD": 256}

CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "one row": (one_row._row_kernel, PRODUCT, EPILOGUE | {"ONCE": False} | BLOCKS),
    "tiles": (products._tile_kernel, PRODUCT, EPILOGUE | BLOCKS | {"BLOCK_N": 64}),
    "shared tiles": (products._shared_tile_kernel, PRODUCT, EPILOGUE | BLOCKS | {"SHARES": 4}),
    "first of a tournament": (candidates._first_kernel, BEST, {"BLOCK": 1024, "KEEP": 64}),
    "last of a tournament": (candidates._last_kernel, BEST, {"BLOCK": 512, "KEEP": 64}),
    "norm": (norms._rms_norm_kernel, NORM, {"ADD": True, "BLOCK": 1024}),
    "split attention": (
        attention._attention_kernel,
        ATTENTION,
        SHAPE | TILE | {"DIRECT": False, "SUFFIX": True},
    ),
    "prompt attention": (
        attention._attention_kernel,
        ATTENTION,
        SHAPE | TILE | {"DIRECT": True, "SUFFIX": True},
    ),
    "gate": (gate._gate_kernel, ROUND, LEASED),
    "settle": (settle._settle_kernel, ROUND, LEASED | CACHE | {"RECORD": 32, "SYNTHETIC": True}),
    "keys": (publish._keys_kernel, ROUND, LEASED | CACHE),
    "depth": (publish._depth_kernel, ROUND, LEASED | CACHE),
    "clock": (clock._clock_kernel, ROUND, LEASED),
    "mail": (mailbox._fetch_kernel, MAIL, LEASED | {"BLOCK": 512}),
    "reduction": (attention._reduce_kernel, ATTENTION, REDUCE | {"SUFFIX": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_for_a_gpu(name: str) -> None:
    kernel, types, constants = CASES[name]
    names = kernel.arg_names
    constants = {n: value for n, value in (constants | {"PDL": True}).items() if n in names}
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types[n] for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if types.get(n, "").startswith("*") or n == "K"
        },
    )
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4, "launch_pdl": True})
    assert "griddepcontrol.wait" in compiled.asm["ptx"]
    if name == "tiles":
        # A wide matrix goes from memory to the tensor cores without passing through registers.
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert "cp.async" in compiled.asm["ptx"]
        assert "ld.global" not in compiled.asm["ptx"].split("wgmma.mma_async")[0]
