"""Times of single kernels on the GPU: products, attention, choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from bench.gpu_common import Report, free_memory, graphed, time_ms
from models.batch import ForwardBatch
from models.cuda.attention import paged_attention
from models.cuda.noise import choose
from models.cuda.skinny import Tiling, skinny_linear
from models.cuda.tiles import fixed_tiles, tile_width

BLOCK = 16


def time_products(report: Report, wanted: Sequence[str] = ()) -> None:
    """The fused products against cuBLAS, weights rotated so that none stays in the cache."""
    cases = (
        ("135m qkv", 576, 960),
        ("135m down", 1536, 576),
        ("1b qkv", 2048, 3072),
        ("1b down", 8192, 2048),
        ("1b gate_up", 2048, 16384),
        ("1b head", 2048, 128256),
        ("0.6b gate_up", 1024, 6144),
        ("8b qkv", 4096, 6144),
        ("8b o", 4096, 4096),
        ("8b gate_up", 4096, 28672),
        ("8b down", 14336, 4096),
    )
    for name, k, n in cases:
        if wanted and name not in wanted:
            continue
        bytes_each = 2 * k * n
        copies = max(1, min(64, -(-200_000_000 // bytes_each)))
        weights = [torch.randn((n, k), device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        norm = torch.randn(k, device="cuda")
        for rows in (1, 8, 24):
            x = torch.randn((rows, k), device="cuda", dtype=torch.bfloat16)
            row: dict[str, float] = {}
            for label, run in _product_runs(x, weights, norm).items():
                us = time_ms(graphed(run), 0.1) / copies * 1e3
                row[f"{label}_us"] = us
                row[f"{label}_GBps"] = bytes_each / us / 1e3
            report.add("product", case=name, rows=rows, **row)
        with report.section(f"tilings {name}"):
            _time_tilings(report, name, weights)
        del weights
        free_memory()


TILINGS_OF_ONE = [
    Tiling(rows, columns, warps)
    for rows, columns, warps in (
        (2, 512, 2),
        (4, 512, 4),
        (8, 512, 4),
        (2, 1024, 4),
        (4, 1024, 4),
        (8, 1024, 4),
        (4, 1024, 8),
        (8, 1024, 8),
        (1, 2048, 4),
        (2, 2048, 4),
        (4, 2048, 8),
        (2, 4096, 8),
    )
]


TILINGS_OF_SEVERAL = [
    Tiling(*numbers)
    for numbers in (
        (16, 256, 2, 4),
        (16, 256, 4, 4),
        (32, 128, 4, 5),
        (32, 256, 4, 3),
        (32, 256, 4, 4),
        (64, 128, 4, 4),
    )
]


def _time_tilings(report: Report, name: str, weights: list[torch.Tensor]) -> None:
    """One row and eight, cut in several ways."""
    n, k = weights[0].shape
    for rows, tilings in ((1, TILINGS_OF_ONE), (8, TILINGS_OF_SEVERAL)):
        x = torch.randn((rows, k), device="cuda", dtype=torch.bfloat16)
        for tiling in tilings:
            if tiling.columns > max(512, 2 * k):
                continue

            def run(x: torch.Tensor = x, tiling: Tiling = tiling) -> None:
                for w in weights:
                    skinny_linear(x, w, tiling=tiling)

            us = time_ms(graphed(run), 0.05) / len(weights) * 1e3
            cut, rate = "x".join(map(str, tiling)), 2 * n * k / us / 1e3
            report.add("tiling", case=name, rows=rows, tiling=cut, us=us, GBps=rate)


def _product_runs(
    x: torch.Tensor, weights: list[torch.Tensor], norm: torch.Tensor
) -> dict[str, Callable[[], object]]:
    return {
        "cublas": lambda: [functional.linear(x, w) for w in weights],
        "skinny": lambda: [skinny_linear(x, w) for w in weights],
        "skinny_norm": lambda: [skinny_linear(x, w, norm=norm, eps=1e-5) for w in weights],
    }


def time_attention(report: Report) -> None:
    """One layer's attention by context, tokens and split length, caches rotated."""
    for name, heads, kv_heads, dim in (("8b", 32, 8, 128), ("1b", 32, 8, 64), ("135m", 9, 3, 64)):
        for context in (512, 8192):
            for tokens, suffix in ((1, 0), (8, 0), (24, 5)):
                usual = tile_width(tokens, heads, kv_heads, torch.bfloat16)
                for width in sorted({usual, usual // 2, usual // 4} if tokens > 8 else {usual}):
                    row: dict[str, float] = {}
                    for split in (64, 128, 256):
                        shape = (heads, kv_heads, dim, context, tokens, suffix)
                        run = _attention_case(*shape, split, width)
                        row[f"split{split}_us"] = time_ms(graphed(run), 0.05) * 1e3 / 16
                    report.add(
                        "attention", case=name, context=context, tokens=tokens, width=width, **row
                    )


def _attention_case(
    heads: int,
    kv_heads: int,
    dim: int,
    context: int,
    tokens: int,
    suffix: int,
    split: int,
    width: int,
) -> Callable[[], None]:
    blocks = context // BLOCK + 16
    caches = [
        torch.randn((blocks, BLOCK, kv_heads, dim), device="cuda", dtype=torch.bfloat16)
        for _ in range(8)
    ]
    q = torch.randn((tokens, heads, dim), device="cuda", dtype=torch.bfloat16)
    zeros = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    lens = torch.full((tokens,), context, dtype=torch.int32, device="cuda")
    lens -= torch.arange(tokens, device="cuda").int() % 6
    table = torch.randperm(context // BLOCK, device="cuda").int()[None]
    slots = context + torch.arange(tokens * suffix, device="cuda").int() % (16 * BLOCK)
    batch = ForwardBatch(
        zeros,
        zeros,
        zeros,
        zeros.int(),
        table,
        lens,
        zeros,
        slots.view(tokens, suffix) if suffix else None,
        torch.full((tokens,), suffix, dtype=torch.int32, device="cuda") if suffix else None,
    )
    tiles = fixed_tiles(1, tokens, width, torch.device("cuda"))

    def run() -> None:
        for i in range(16):
            keys, values = caches[i % 8], caches[(i + 3) % 8]
            paged_attention(q, keys, values, batch, tiles, dim**-0.5, split)

    return run


def time_sampling(report: Report) -> None:
    """Noised argmax of a step's rows."""
    for vocab in (49152, 128256):
        for rows in (1, 8, 24):
            logits = torch.randn((rows, vocab), device="cuda", dtype=torch.bfloat16)
            keys = torch.randint(2**62, (rows,), device="cuda")
            ones = torch.ones(rows, device="cuda")
            run = graphed(partial(choose, logits, keys, ones))
            report.add("choose", vocab=vocab, rows=rows, us=time_ms(run, 0.05) * 1e3)
