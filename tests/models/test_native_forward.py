"""The fused forward: bitwise the operations called one by one, and transformers' numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.batch import ForwardBatch
from models.kv_cache import KVCache
from models.native.forward import FusedForward
from models.registry import load_model
from models.sequence_batch import build_batch
from models.transformer import Transformer
from tests.models.tiny import Family, make_tiny, random_tokens, reference_logits

BLOCK = 4
BLOCKS = 64

CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-odd": ("llama", {"hidden_size": 36, "intermediate_size": 50, "head_dim": 12}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-layer": ("llama", {"num_hidden_layers": 1, "num_attention_heads": 8}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


def step_by_step(model: Transformer, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
    """The decoder by the backend's single operations, all rows to the end."""
    backend, eps = model.backend, model.config.rms_norm_eps
    batch.plan = None
    residual = model.embedding(batch.tokens)
    x = backend.rms_norm(residual, model.layers[0].input_norm, eps)
    norms = [layer.input_norm for layer in model.layers[1:]] + [model.norm]
    for layer, following, keys, values in zip(model.layers, norms, kv.keys, kv.values, strict=True):
        q = layer.attention.store(x, batch, keys, values)
        mixed = layer.attention.attend(q, batch, keys, values)
        x, residual = backend.add_rms_norm(
            layer.attention.project(mixed), residual, layer.post_norm, eps
        )
        x, residual = backend.add_rms_norm(layer.mlp(x), residual, following, eps)
    return x[batch.logit_index]


def fused(model: Transformer, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
    batch.plan = None
    run = FusedForward(model.layers, model.norm, model.config.rms_norm_eps)
    return run(model.embedding(batch.tokens), batch, kv)


def filled_cache(model: Transformer) -> KVCache:
    kv = model.make_kv(BLOCKS, BLOCK)
    generator = torch.Generator().manual_seed(3)
    for cache in (*kv.keys, *kv.values):
        cache.normal_(generator=generator)
    return kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_fused_forward_is_bitwise_the_operations(
    tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    family, overrides = CASES[case]
    model = load_model(make_tiny(tmp_path, family, dtype=dtype, **overrides), backend="native")
    order = np.random.default_rng().permutation(BLOCKS).tolist()
    tables = [order[:20], order[20:40], order[40:60]]
    tokens = random_tokens(60, 97)
    batches = {
        "decode": [(tables[0], 50, tokens[:1], 0)],
        "mixed": [(tables[0], 0, tokens[:31], 29), (tables[1], 7, tokens[:6], 0)],
        "no logits": [(tables[2], 3, tokens[:9], 9)],
    }
    for name, parts in batches.items():
        batch = build_batch(parts, BLOCK)
        expected_kv, kv = filled_cache(model), filled_cache(model)
        expected = step_by_step(model, batch, expected_kv)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(fused(model, batch, kv), expected), (name, threads)
            caches = zip(kv.keys + kv.values, expected_kv.keys + expected_kv.values, strict=True)
            assert all(torch.equal(got, want) for got, want in caches)
        torch.set_num_threads(1)


def test_large_batch_crosses_the_shared_norm_path(tmp_path: Path) -> None:
    """More than 16384 activations: threads share the norms instead of repeating them."""
    model = load_model(make_tiny(tmp_path, hidden_size=320), backend="native")
    batch = build_batch([(list(range(20)), 0, random_tokens(60, 97), 30)], BLOCK)
    assert batch.tokens.shape[0] * 320 > 16384
    expected = step_by_step(model, batch, filled_cache(model))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(fused(model, batch, filled_cache(model)), expected)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    family, overrides = CASES[case]
    folder = make_tiny(tmp_path, family, **overrides)
    tokens = random_tokens(40, 97)
    model = load_model(folder, backend="native")
    kv, table = model.make_kv(BLOCKS, BLOCK), list(range(10, 20))
    parts = []
    for start, stop in [(0, 5), (5, 27), *((i, i + 1) for i in range(27, 40))]:
        batch = build_batch([(table, start, tokens[start:stop], 0)], BLOCK)
        parts.append(model.logits(model.forward(batch, kv)))
    torch.testing.assert_close(
        torch.cat(parts), reference_logits(folder, tokens), atol=1e-4, rtol=1e-4
    )


def test_branch_token_is_bitwise_the_trunk_token(tmp_path: Path) -> None:
    """A chain decoded as a branch (its K and V in scattered suffix slots), in a batch with other
    branches, has the hidden states of plain decoding."""
    model = load_model(make_tiny(tmp_path), backend="native")
    tokens = random_tokens(24, 97)
    kv = model.make_kv(BLOCKS, BLOCK)
    trunk = list(range(8))
    plain = model.forward(build_batch([(trunk, 0, tokens, 0)], BLOCK), kv)
    prefix = 18
    chain, slots = tokens[prefix:], torch.tensor([130, 141, 139, 201, 150, 162])
    other = torch.tensor([180, 181, 182, 183, 184, 185])
    for step, token in enumerate(chain):
        batch = ForwardBatch(
            tokens=torch.tensor([5, token]),
            positions=torch.full((2,), prefix + step),
            slots=torch.stack([other[step], slots[step]]),
            seqs=torch.zeros(2, dtype=torch.int32),
            block_tables=torch.tensor([trunk], dtype=torch.int32),
            context_lens=torch.full((2,), prefix, dtype=torch.int32),
            logit_index=torch.arange(2),
            suffix_slots=torch.stack([other, slots]),
            suffix_lens=torch.full((2,), step + 1, dtype=torch.int32),
        )
        assert torch.equal(model.forward(batch, kv)[1], plain[prefix + step])
