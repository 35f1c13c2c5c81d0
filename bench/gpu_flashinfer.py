"""FlashInfer's attention against ours, one layer: pieces of prompts, verification, decoding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bench.gpu_common import Report, error, graphed, time_ms
from models.backends.cuda import CudaBackend
from models.batch import ForwardBatch
from models.sequence_batch import build_batch

BLOCK = 16
LAYERS = 8  # caches taken in turn
SHAPES = (("8b", 32, 8, 128), ("1b", 32, 8, 64))
CASES = ((512, 0), (512, 7680), (2048, 0), (8, 512), (8, 8184), (1, 512), (1, 8191))
"""(tokens, positions before them)."""


def time_prompts(report: Report) -> None:
    """Microseconds of a layer's attention, and how far the two lie apart."""
    ours = CudaBackend("cuda", torch.bfloat16)
    theirs = CudaBackend("cuda", torch.bfloat16, attention="flashinfer")
    for name, heads, kv_heads, dim in SHAPES:
        for tokens, before in CASES:
            length = tokens + before
            blocks = -(-length // BLOCK)
            table = np.random.default_rng(1).permutation(blocks).astype(np.int32)
            batch = build_batch([(table, before, [0] * tokens, tokens)], BLOCK, "cuda")
            caches = [
                torch.randn((2, blocks, BLOCK, kv_heads, dim), device="cuda").bfloat16()
                for _ in range(LAYERS)
            ]
            q = torch.randn((tokens, heads, dim), device="cuda").bfloat16()
            runs = [_layers(b, q, caches, batch) for b in (ours, theirs)]
            apart = error(runs[1](), runs[0]())
            times = []
            for run in runs:
                batch.plan = None
                run()  # plans
                times.append(time_ms(graphed(run), 0.1) * 1e3 / LAYERS)
            report.add(
                "prompt",
                case=name,
                tokens=tokens,
                before=before,
                triton_us=times[0],
                flashinfer_us=times[1],
                apart=apart,
            )


def _layers(
    backend: CudaBackend, q: torch.Tensor, caches: list[torch.Tensor], batch: ForwardBatch
) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        out = q
        for keys, values in caches:
            out = backend.attention(q, keys, values, batch, q.shape[2] ** -0.5)
        return out

    return run
