"""Times on the GPU: bandwidth and steps of true shapes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from bench.copy_bandwidth import copy_bandwidth as copying
from bench.gpu_common import Report, time_ms
from models.backends.cuda import CudaBackend, CudaOptions
from models.cuda import overlap
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepRow
from models.cuda.tree_inputs import TreeInputs
from models.cuda.tree_runner import TreeRunner
from models.kv_cache import KVCache
from models.shapes import build_random, shape
from models.transformer import Transformer

BLOCK = 16
CONTEXT = 512
MAX_POSITIONS = 1024
STEPS = 5
HOST_TOKENS = 64
DRAFTS = ("smollm2-draft-16m", "qwen3-0.6b", "llama-3.2-1b", "smollm2-135m")
TREES = (12, 24)
VARIANTS = {
    "default": CudaOptions(),
    "fused": CudaOptions(fused_width=8192),
    "cublas": CudaOptions(few_tokens=0),
    "serial": CudaOptions(),
}
"""Ways to run a model: the exact one, single tokens with norm and gate in the products' kernels,
cuBLAS' products, and the first without overlapping launches."""


def copy_bandwidth(report: Report) -> float:
    """Device-to-device copy, TB/s of bytes read plus written."""
    rate = copying("cuda") * 1e-12
    report.data["bandwidth_TBps"] = rate
    report.add("copy", TBps=rate)
    return rate


def read_bandwidth(report: Report) -> None:
    """Reading alone, which is what decoding does: the largest of many values, TB/s."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    ms = time_ms(source.max)
    report.add("read", GB=source.nbytes / 1e9, ms=ms, TBps=source.nbytes / ms / 1e9)


def time_model(report: Report, name: str, bandwidth: float, variants: Sequence[str]) -> None:
    """AR, verification and tree rows of one shape, with and without the fused products."""
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
        backend.options = VARIANTS[variant]
        with (
            report.section(f"{name} {variant}"),
            torch.inference_mode(),
            overlapping(variant != "serial"),
        ):
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


def _host_loop(runner: GraphRunner, table: list[int]) -> float:
    """Tokens a second when the host reads each token and feeds the next."""
    token = 5
    for part in (8, HOST_TOKENS):
        torch.cuda.synchronize()
        start = time.monotonic()
        for i in range(part):
            out = runner.run([StepRow(table, CONTEXT + i, [token], seed=1, temperature=1.0)], 1)
            token = int(out.chosen[0, 0])
        took = time.monotonic() - start
    return HOST_TOKENS / took


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


@contextmanager
def overlapping(wanted: bool) -> Iterator[None]:
    """With or without programmatic dependent launches, for kernels compiled inside."""
    before = os.environ.get(overlap.SWITCH)
    if not wanted:
        os.environ[overlap.SWITCH] = "0"
    overlap.supported.cache_clear()
    try:
        yield
    finally:
        os.environ.pop(overlap.SWITCH, None)
        if before is not None:
            os.environ[overlap.SWITCH] = before
        overlap.supported.cache_clear()
