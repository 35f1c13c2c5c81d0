"""Tensor parallelism: two real processes over gloo give one process's numbers."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from models.parallel import TensorParallel
from models.sharding import Shard, Span, plan_shard
from ssd_pipe.errors import ModelError
from tests.models.ranks import logits_of, rank_main
from tests.models.tiny import Family, make_tiny

CASES: list[tuple[str, Family, dict[str, Any]]] = [
    ("even", "llama", {"attention_bias": True, "mlp_bias": True}),
    (
        "three-kv-heads",
        "llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    (
        "one-kv-head",
        "qwen3",
        {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    ("tied", "qwen3", {"tie_word_embeddings": True, "intermediate_size": 72}),
    ("tiny-vocabulary", "llama", {"vocab_size": 5, "tie_word_embeddings": True}),
]


def test_two_ranks_equal_one_and_notice_a_lost_peer(tmp_path: Path) -> None:
    names = [name for name, _, _ in CASES]
    for name, family, overrides in CASES:
        make_tiny(tmp_path, family, name=name, **overrides)
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank_main, args=(rank, str(tmp_path), names), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    for name in names:
        expected = logits_of(tmp_path / name, TensorParallel())
        found = torch.load(tmp_path / f"{name}.pt")
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (tmp_path / "lost").read_text().startswith("tensor-parallel group: ")


def test_one_rank_joins_nothing() -> None:
    tp = TensorParallel.create(0, 1, "file:///nowhere/at/all")
    x = torch.ones(2, 3)
    assert tp.all_reduce(x) is x
    logits = tp.gather_logits(x, 2)
    assert logits is not None
    assert logits.shape == (2, 2)
    tp.close()


def shape(heads: int, kv_heads: int, width: int = 1536, vocab: int = 49152) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=576,
        intermediate_size=width,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_positions=8192,
        rope=None,  # type: ignore[arg-type]
    )


def test_shard_of_uneven_heads_keeps_groups_whole() -> None:
    first, second = (plan_shard(shape(9, 3), rank, 2) for rank in range(2))
    assert first == Shard(Span(0, 3), Span(0, 1), Span(0, 768), Span(0, 24576), 24576)
    assert second == Shard(Span(3, 9), Span(1, 3), Span(768, 1536), Span(24576, 49152), 24576)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(9, 3, 2), (32, 8, 8), (32, 8, 16), (14, 2, 6), (12, 1, 5)]
)
def test_shards_cover_everything_once(heads: int, kv_heads: int, size: int) -> None:
    config = shape(heads, kv_heads, width=848, vocab=1001)
    shards = [plan_shard(config, rank, size) for rank in range(size)]

    def covered(spans: list[Span]) -> list[int]:
        return [i for span in spans for i in range(span.start, span.stop)]

    assert covered([s.heads for s in shards]) == list(range(heads))
    assert covered([s.intermediate for s in shards]) == list(range(848))
    assert covered([s.vocab for s in shards]) == list(range(1001))
    group = heads // kv_heads
    for s in shards:
        assert {h // group for h in covered([s.heads])} == set(covered([s.kv_heads]))
        assert len(s.heads) % len(s.kv_heads) == 0
        assert len(s.intermediate) % 16 == 0
        assert s.vocab_rows * size >= 1001 > s.vocab_rows * (size - 1)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (shape(9, 3), 4, "9 heads with 3 KV heads cannot be split over tp = 4"),
        (shape(4, 4), 8, "4 heads with 4 KV heads cannot be split over tp = 8"),
        (shape(4, 4, width=2), 4, "intermediate_size 2 cannot be split over tp = 4"),
    ],
)
def test_impossible_splits_are_named(config: ModelConfig, size: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        plan_shard(config, 0, size)
