"""FlashInfer's attention in the CUDA backend, against ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: torch.cuda.is_available() is false", allow_module_level=True)

from bench.gpu_checks import MODEL_LIMIT, WideWeights, small_shapes
from bench.gpu_common import error
from models.backends.cuda import CudaBackend
from models.cuda.flashinfer import FlashPlan, installed
from models.loader import build_transformer
from models.parallel import TensorParallel
from models.sequence_batch import build_batch

if not installed():
    pytest.skip("FlashInfer is not installed", allow_module_level=True)


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "dim"),
    [("llama", 9, 3, 64), ("llama", 32, 8, 64), ("llama", 32, 8, 128), ("qwen3", 4, 2, 128)],
)
def test_prompts_in_pieces_equal_our_kernel(
    family: str, heads: int, kv_heads: int, dim: int
) -> None:
    """Heads of SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B and of a Qwen3."""
    config = replace(small_shapes()[family], num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [order[:24], order[24:30], order[30:48]]
    pieces = [
        [(tables[0], 0, 200, 190), (tables[1], 0, 70, 60)],
        [(tables[0], 200, 150, 140), (tables[2], 0, 33, 33), (tables[1], 70, 1, 0)],
    ]
    found = []
    for attention in ("triton", "flashinfer"):
        backend = CudaBackend("cuda", torch.bfloat16, attention=attention)  # type: ignore[arg-type]
        weights = WideWeights(torch.bfloat16, 1)
        model = build_transformer(config, weights, backend, TensorParallel(), 1024)
        kv = model.make_kv(48, 16)
        logits = []
        for rows in pieces:
            batch = build_batch(
                [
                    (table, start, [(start + 7 * i) % config.vocab_size for i in range(n)], first)
                    for table, start, n, first in rows
                ],
                16,
                "cuda",
            )
            logits.append(model.logits(model.forward(batch, kv)))
            assert isinstance(batch.plan, FlashPlan) == (attention == "flashinfer")
        found.append(torch.cat([part for part in logits if part is not None]))
    assert error(found[1], found[0]) <= MODEL_LIMIT[torch.bfloat16]
