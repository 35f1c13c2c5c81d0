"""Times on the GPU: bandwidth, steps of true shapes, single kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from bench.gpu_common import Report, free_memory, graphed, time_ms
from models.backends.cuda import CudaBackend, CudaOptions
from models.batch import ForwardBatch
from models.cuda.attention import paged_attention
from models.cuda.graphs import GraphRunner, StepRow
from models.cuda.noise import choose
from models.cuda.skinny import skinny_linear
from models.cuda.tiles import fixed_tiles, tile_width
from models.cuda.tree import TreeInputs, TreeRunner
from models.kv_cache import KVCache
from models.shapes import build_random, shape
from models.transformer import Transformer

BLOCK = 16
CONTEXT = 512
MAX_POSITIONS = 1024
STEPS = 5
DRAFTS = ("smollm2-draft-16m", "qwen3-0.6b", "llama-3.2-1b", "smollm2-135m")
TREES = (12, 24)
OFF = CudaOptions(fused_tokens=0)
ALL = CudaOptions(fused_tokens=32, fused_width=8192, single_width=8192)


def copy_bandwidth(report: Report) -> float:
    """Device-to-device copy, TB/s of bytes read plus written."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    ms = time_ms(lambda: target.copy_(source))
    rate = 2 * source.nbytes / ms / 1e9
    report.data["bandwidth_TBps"] = rate
    report.add("copy", GB=2 * source.nbytes / 1e9, ms=ms, TBps=rate)
    return rate


def read_bandwidth(report: Report) -> None:
    """Reading alone, which is what decoding does: the largest of many values, TB/s."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    ms = time_ms(source.max)
    report.add("read", GB=source.nbytes / 1e9, ms=ms, TBps=source.nbytes / ms / 1e9)


def time_model(report: Report, name: str, bandwidth: float, variants: Sequence[str]) -> None:
    """AR, verification and tree rows of one shape, with and without the fused products."""
    options = {"default": CudaOptions(), "fused": ALL, "plain": OFF}
    backend = CudaBackend("cuda", torch.bfloat16)
    start = time.monotonic()
    model = build_random(shape(name), backend, max_positions=MAX_POSITIONS)
    torch.cuda.synchronize()
    report.note(
        f"{name}: {model.weight_bytes / 1e9:.2f} GB built in {time.monotonic() - start:.1f} s"
    )
    kv = model.make_kv(3 * MAX_POSITIONS // BLOCK, BLOCK)
    # A cache of zeros would make attention's arithmetic unlike a real step's.
    for cache in (*kv.keys, *kv.values):
        cache.normal_()
    for variant in variants:
        backend.options = options[variant]
        with report.section(f"{name} {variant}"), torch.inference_mode():
            _time_variant(report, name, variant, model, kv, bandwidth)
    with report.section(f"{name} profile"):
        backend.options = CudaOptions()
        _profile(report, name, model, kv)


def _time_variant(
    report: Report, name: str, variant: str, model: Transformer, kv: KVCache, bandwidth: float
) -> None:
    table = list(range(MAX_POSITIONS // BLOCK))
    runner = GraphRunner(model, kv, 8, MAX_POSITIONS)
    times = {}
    for width in (1, 6, 8):
        row = StepRow(table, CONTEXT, list(range(5, 5 + width)), seed=1, temperature=1.0)
        runner.run([row], width)
        graph = runner.graph(1, width, len(table))
        times[width] = time_ms(graph.launch)
    decode = times[1]
    report.add(
        "decode",
        shape=name,
        variant=variant,
        ms=decode,
        tok_s=1e3 / decode,
        bandwidth_share=model.weight_bytes / (decode * 1e-3) / (bandwidth * 1e12),
        verify6=times[6] / decode,
        verify8=times[8] / decode,
    )
    if model.weight_bytes < 20e9:
        report.add(
            "host",
            shape=name,
            variant=variant,
            tok_s_with_host_loop=_host_loop(runner, table),
        )
        rows = [StepRow(table, CONTEXT, [7], seed=i, temperature=1.0) for i in range(8)]
        runner.run(rows, 1)
        report.add(
            "batch8", shape=name, variant=variant, ms=time_ms(runner.graph(8, 1, len(table)).launch)
        )
    if name in DRAFTS:
        for branches in TREES:
            total = _time_tree(model, kv, table, branches)
            report.add(
                "tree",
                shape=name,
                variant=variant,
                branches=branches,
                steps=STEPS,
                total_ms=total,
                step_over_ar=total / STEPS / decode,
            )


def _host_loop(runner: GraphRunner, table: list[int], tokens: int = 64) -> float:
    """Tokens a second when the host reads each token and feeds the next."""
    token = 5
    for part in (8, tokens):
        torch.cuda.synchronize()
        start = time.monotonic()
        for i in range(part):
            out = runner.run([StepRow(table, CONTEXT + i, [token], seed=1, temperature=1.0)], 1)
            token = int(out.chosen[0, 0])
        took = time.monotonic() - start
    return tokens / took


def _time_tree(model: Transformer, kv: KVCache, table: list[int], branches: int) -> float:
    runner = TreeRunner(model, kv, STEPS, 1, branches, MAX_POSITIONS)
    rng = np.random.default_rng(1)
    context = CONTEXT - np.arange(branches) % (STEPS + 1)
    runner.run(
        TreeInputs(
            tokens=rng.integers(0, model.config.vocab_size, branches),
            positions=context.astype(np.int64),
            context_lens=context,
            seqs=np.zeros(branches, np.int64),
            tables=[table],
            scratch=MAX_POSITIONS + np.arange(branches) * STEPS,
            keys=rng.integers(0, 2**62, (STEPS, branches)),
            temperature=np.ones(branches),
        )
    )
    return time_ms(runner.graph(1).launch)


def _profile(report: Report, name: str, model: Transformer, kv: KVCache) -> None:
    """Kernel times of one decode and one verification step, for the log."""
    table = list(range(MAX_POSITIONS // BLOCK))
    runner = GraphRunner(model, kv, 1, MAX_POSITIONS)
    for width in (1, 8):
        row = StepRow(table, CONTEXT, [5] * width, temperature=1.0)
        runner.run([row], width)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                runner.graph(1, width, len(table)).launch()
            torch.cuda.synchronize()
        averages = profile.key_averages()
        report.detail(f"\nprofile of {name}, {width} tokens, 3 steps")
        report.detail(
            averages.table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=70)
        )


def time_products(report: Report) -> None:
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
        ("8b gate_up", 4096, 28672),
        ("8b down", 14336, 4096),
    )
    for name, k, n in cases:
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
        del weights
        free_memory()


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
        for context in (512, 2048, 8192):
            for tokens, suffix in ((1, 0), (8, 0), (24, 5)):
                row: dict[str, float] = {}
                for split in (64, 128, 256, 512):
                    run = _attention_case(heads, kv_heads, dim, context, tokens, suffix, split)
                    row[f"split{split}_us"] = time_ms(graphed(run), 0.05) * 1e3 / 16
                report.add("attention", case=name, context=context, tokens=tokens, **row)


def _attention_case(
    heads: int, kv_heads: int, dim: int, context: int, tokens: int, suffix: int, split: int
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
    tiles = fixed_tiles(
        1, tokens, tile_width(tokens, heads, kv_heads, q.dtype), torch.device("cuda")
    )

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
