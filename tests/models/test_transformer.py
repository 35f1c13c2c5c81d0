"""Logits against transformers': every way the engine feeds tokens gives the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.batch import ForwardBatch
from models.registry import load_model
from models.sequence_batch import build_batch
from models.transformer import Transformer
from tests.models.tiny import LLAMA3_ROPE, Family, make_tiny, random_tokens, reference_logits

BLOCK = 4
BLOCKS = 32
DRAFT = Path(__file__).parents[2] / "models" / "smollm2-draft-16m"

CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-wide-heads": ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
}


def load(folder: Path, **settings: Any) -> Transformer:
    return load_model(folder, backend="reference", **settings)


def run(model: Transformer, kv: Any, batch: ForwardBatch) -> torch.Tensor:
    logits = model.logits(model.forward(batch, kv))
    assert logits is not None
    return logits


def block_table(seed: int, blocks: int = 12) -> list[int]:
    return np.random.default_rng(seed).permutation(BLOCKS)[:blocks].tolist()


@pytest.mark.parametrize("case", CASES)
def test_prefill_chunks_and_decode_equal_transformers(tmp_path: Path, case: str) -> None:
    family, overrides = CASES[case]
    folder = make_tiny(tmp_path, family, **overrides)
    tokens = random_tokens(45, 97)
    expected = reference_logits(folder, tokens)
    model = load(folder)
    table = block_table(1)

    whole = run(model, model.make_kv(BLOCKS, BLOCK), build_batch([(table, 0, tokens, 0)], BLOCK))
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)

    kv = model.make_kv(BLOCKS, BLOCK)
    parts = []
    for start, stop in [(0, 7), (7, 8), (8, 30), *((i, i + 1) for i in range(30, 45))]:
        parts.append(run(model, kv, build_batch([(table, start, tokens[start:stop], 0)], BLOCK)))
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_mixed_batch_returns_only_wanted_rows_and_leaves_neighbours_alone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    model = load(folder)
    kv = model.make_kv(BLOCKS, BLOCK)
    a, b, c = (random_tokens(20, 97, seed) for seed in (1, 2, 3))
    order = block_table(5, 18)
    tables = [order[:6], order[6:12], order[12:]]
    model.forward(build_batch([(tables[0], 0, a[:14], 14), (tables[1], 0, b[:9], 9)], BLOCK), kv)
    batch = build_batch(
        [(tables[0], 14, a[14:], 2), (tables[1], 9, b[9:10], 0), (tables[2], 0, c, 20)], BLOCK
    )
    logits = run(model, kv, batch)
    expected = torch.cat((reference_logits(folder, a)[16:], reference_logits(folder, b)[9:10]))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    # The row without logits stored its keys all the same, in the last layer too.
    after = run(model, kv, build_batch([(tables[2], 19, c[19:], 0)], BLOCK))
    torch.testing.assert_close(after, reference_logits(folder, c)[19:], atol=1e-4, rtol=1e-4)


def test_no_wanted_logits_gives_empty_tensors_and_a_filled_cache(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    model = load(folder)
    kv = model.make_kv(BLOCKS, BLOCK)
    tokens, table = random_tokens(10, 97), block_table(2)
    hidden = model.forward(build_batch([(table, 0, tokens[:9], 9)], BLOCK), kv)
    assert hidden.shape == (0, 64)
    logits = model.logits(hidden)
    assert logits is not None
    assert logits.shape == (0, 97)
    assert logits.dtype == torch.float32
    after = run(model, kv, build_batch([(table, 9, tokens[9:], 0)], BLOCK))
    torch.testing.assert_close(after, reference_logits(folder, tokens)[9:], atol=1e-4, rtol=1e-4)


def branch_batch(
    trunks: list[tuple[list[int], int]], branches: list[tuple[int, int, list[int], list[int]]]
) -> ForwardBatch:
    """The last token of each branch (trunk, context, tokens, their slots), decoded together."""
    width = max(len(slots) for _, _, _, slots in branches) + 2
    count = len(branches)
    suffix = torch.full((count, width), 3, dtype=torch.int32)
    for i, (_, _, _, slots) in enumerate(branches):
        suffix[i, : len(slots)] = torch.tensor(slots)
    positions = torch.tensor([context + len(tokens) - 1 for _, context, tokens, _ in branches])
    return ForwardBatch(
        tokens=torch.tensor([tokens[-1] for _, _, tokens, _ in branches]),
        positions=positions,
        slots=torch.tensor([slots[-1] for _, _, _, slots in branches]),
        seqs=torch.tensor([trunk for trunk, _, _, _ in branches], dtype=torch.int32),
        block_tables=torch.tensor([table for table, _ in trunks], dtype=torch.int32),
        context_lens=torch.tensor([context for _, context, _, _ in branches], dtype=torch.int32),
        logit_index=torch.arange(count),
        suffix_slots=suffix,
        suffix_lens=torch.tensor([len(slots) for *_, slots in branches], dtype=torch.int32),
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_branches_equal_linear_runs_of_the_same_tokens(tmp_path: Path, family: Family) -> None:
    folder = make_tiny(tmp_path, family)
    model = load(folder)
    kv = model.make_kv(BLOCKS, BLOCK)
    order = block_table(7, BLOCKS)
    trunks = [(order[:5], 18), (order[5:10], 11)]
    texts = [random_tokens(length, 97, seed) for seed, (_, length) in enumerate(trunks)]
    rows = [(table, 0, text, len(text)) for (table, _), text in zip(trunks, texts, strict=True)]
    model.forward(build_batch(rows, BLOCK), kv)
    free = [block * BLOCK + i for block in order[10:] for i in range(BLOCK)]
    # (trunk, tokens of it seen, own tokens): interleaved sequences, several fork points.
    plan = [(0, 18), (1, 11), (0, 16), (1, 7), (0, 16), (0, 17)]
    steps = 3
    own = [random_tokens(steps, 97, 50 + i) for i in range(len(plan))]
    for step in range(1, steps + 1):
        branches = [
            (trunk, context, own[i][:step], free[i * steps : i * steps + step])
            for i, (trunk, context) in enumerate(plan)
        ]
        logits = run(model, kv, branch_batch(trunks, branches))
        for i, (trunk, context) in enumerate(plan):
            linear = texts[trunk][:context] + own[i][:step]
            expected = reference_logits(folder, linear)[-1]
            torch.testing.assert_close(logits[i], expected, atol=1e-4, rtol=1e-4)


def test_trunk_and_branch_tokens_share_a_batch(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    model = load(folder)
    kv = model.make_kv(BLOCKS, BLOCK)
    table, text = block_table(3, 5), random_tokens(12, 97)
    model.forward(build_batch([(table, 0, text[:10], 10)], BLOCK), kv)
    trunk = build_batch([(table, 10, text[10:], 0)], BLOCK)
    spare = next(b for b in range(BLOCKS) if b not in table) * BLOCK
    both = ForwardBatch(
        tokens=torch.cat((trunk.tokens, torch.tensor([33]))),
        positions=torch.cat((trunk.positions, torch.tensor([8]))),
        slots=torch.cat((trunk.slots, torch.tensor([spare]))),
        seqs=torch.zeros(3, dtype=torch.int32),
        block_tables=trunk.block_tables,
        context_lens=torch.tensor([11, 12, 8], dtype=torch.int32),
        logit_index=torch.arange(3),
        suffix_slots=torch.tensor([[0], [0], [spare]], dtype=torch.int32),
        suffix_lens=torch.tensor([0, 0, 1], dtype=torch.int32),
    )
    logits = run(model, kv, both)
    forked = reference_logits(folder, [*text[:8], 33])[-1:]
    expected = torch.cat((reference_logits(folder, text)[10:], forked))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_arithmetic_is_close_to_float32(tmp_path: Path, family: Family) -> None:
    folder = make_tiny(tmp_path, family, dtype=torch.bfloat16, initializer_range=0.1)
    tokens, table = random_tokens(40, 97), block_table(4)
    expected = reference_logits(folder, tokens)
    exact = load(folder)
    exact_logits = run(
        exact, exact.make_kv(BLOCKS, BLOCK), build_batch([(table, 0, tokens, 0)], BLOCK)
    )
    torch.testing.assert_close(exact_logits, expected, atol=1e-4, rtol=1e-4)
    half = load(folder, dtype="bfloat16")
    kv = half.make_kv(BLOCKS, BLOCK)
    assert kv.keys[0].dtype == torch.bfloat16
    logits = run(half, kv, build_batch([(table, 0, tokens, 0)], BLOCK))
    assert logits.dtype == torch.float32
    error = (logits - expected).norm() / expected.norm()
    assert 0 < error < 0.03


def test_draft_model_of_the_project_equals_transformers() -> None:
    model = load(DRAFT)
    tokens = random_tokens(60, 49152, 9)
    table = block_table(8, 20)
    kv = model.make_kv(BLOCKS, BLOCK)
    first = run(model, kv, build_batch([(table, 0, tokens[:50], 0)], BLOCK))
    rest = run(model, kv, build_batch([(table, 50, tokens[50:], 0)], BLOCK))
    expected = reference_logits(DRAFT, tokens)
    torch.testing.assert_close(torch.cat((first, rest)), expected, atol=2e-4, rtol=1e-4)
    assert model.weight_bytes == (DRAFT / "model.safetensors").stat().st_size - sum(
        t.nbytes for t in norms_and_header()
    )


def norms_and_header() -> list[torch.Tensor]:
    """What the draft's file holds besides matrices: its header, and 9 norms of 256 bf16 numbers."""
    path = DRAFT / "model.safetensors"
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    return [torch.empty(header, dtype=torch.uint8), torch.empty(9 * 256, dtype=torch.bfloat16)]


def test_cache_size_is_what_bytes_per_block_says(tmp_path: Path) -> None:
    model = load(make_tiny(tmp_path))
    kv = model.make_kv(BLOCKS, BLOCK)
    assert kv.nbytes == BLOCKS * model.kv_bytes_per_block(BLOCK)
    assert model.kv_bytes_per_block(BLOCK) == 2 * 2 * BLOCK * 2 * 16 * 4


def test_a_batch_refilled_in_place_is_read_afresh(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    model = load(folder)
    kv = model.make_kv(BLOCKS, BLOCK)
    tokens, table = random_tokens(6, 97), block_table(6)
    model.forward(build_batch([(table, 0, tokens[:4], 4)], BLOCK), kv)
    batch = build_batch([(table, 4, tokens[4:5], 0)], BLOCK)
    run(model, kv, batch)
    following = build_batch([(table, 5, tokens[5:], 0)], BLOCK)
    for name in ("tokens", "positions", "slots", "context_lens"):
        getattr(batch, name).copy_(getattr(following, name))
    expected = reference_logits(folder, tokens)[5:]
    torch.testing.assert_close(run(model, kv, batch), expected, atol=1e-4, rtol=1e-4)
