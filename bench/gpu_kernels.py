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
from models.cuda.norms import rms_norm, silu_mul
from models.cuda.one_row import one_row_linear
from models.cuda.products import Tiling, few_rows_linear
from models.cuda.tiles import fixed_tiles, tile_width

BLOCK = 16


def time_products(report: Report, wanted: Sequence[str] = ()) -> None:
    """Our products against cuBLAS', each behind a norm, whose end it may overlap; matrices are
    rotated so that none stays in the cache."""
    cases = (
        ("135m qkv", 576, 960, False),
        ("135m down", 1536, 576, False),
        ("135m gate_up", 576, 1536, True),
        ("1b qkv", 2048, 3072, False),
        ("1b o", 2048, 2048, False),
        ("1b down", 8192, 2048, False),
        ("1b gate_up", 2048, 8192, True),
        ("1b head", 2048, 128256, False),
        ("0.6b gate_up", 1024, 3072, True),
        ("8b qkv", 4096, 6144, False),
        ("8b o", 4096, 4096, False),
        ("8b gate_up", 4096, 14336, True),
        ("8b down", 14336, 4096, False),
        ("70b qkv", 8192, 10240, False),
        ("70b o", 8192, 8192, False),
        ("70b down", 28672, 8192, False),
    )
    for name, k, n, gated in cases:
        if wanted and name not in wanted:
            continue
        shape = (2 * n if gated else n, k)
        copies = max(4, min(64, -(-400_000_000 // (2 * shape[0] * k))))
        weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        with report.section(f"products {name}"):
            for rows in (1, 8, 24):
                _time_product(report, name, weights, rows, gated)
        del weights
        free_memory()


TILINGS = [
    Tiling(*numbers)
    for numbers in (
        (16, 256, 2, 4),
        (16, 256, 2, 4, 1, 0),
        (16, 512, 2, 3),
        (16, 512, 2, 3, 1, 0),
        (32, 256, 4, 4),
        (16, 128, 2, 6, 2),
        (16, 128, 4, 4, 4),
        (16, 128, 4, 4, 4, 0),
        (32, 64, 4, 4, 4),
        (64, 64, 4, 4),
        (64, 128, 4, 4),
        (64, 128, 4, 4, 1, 0),
        (128, 64, 4, 4),
    )
]


def _time_product(
    report: Report, name: str, weights: list[torch.Tensor], rows: int, gated: bool
) -> None:
    k = weights[0].shape[1]
    x = torch.randn((rows, k), device="cuda", dtype=torch.bfloat16)
    narrow, gain = x[:, : min(k, 4096)].contiguous(), torch.ones(min(k, 4096), device="cuda")

    def cublas(w: torch.Tensor) -> torch.Tensor:
        product = functional.linear(x, w)
        return silu_mul(product) if gated else product

    def chain(one: Callable[[torch.Tensor], object]) -> float:
        def run() -> None:
            for w in weights:
                rms_norm(narrow, gain, 1e-5)
                one(w)

        return time_ms(graphed(run), 0.05) / len(weights) * 1e3

    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "cublas": cublas,
        "ours": lambda w: few_rows_linear(x, w, gated=gated),
    }
    if rows == 1:
        ways["one_row"] = lambda w: one_row_linear(x, w, gated=gated)
    times = {f"{way}_us": chain(run) for way, run in ways.items()}
    report.add("product", case=name, rows=rows, **times)
    for cut in TILINGS:
        if gated and cut.rows < 32:
            continue
        us = chain(partial(few_rows_linear, x, gated=gated, cut=cut))
        report.add("tiling", case=name, rows=rows, tiling="x".join(map(str, cut)), us=us)


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
