"""Whole rounds on a real GPU, in bfloat16 and on graphs: what they emit is the target's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: torch.cuda.is_available() is false", allow_module_level=True)
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from ipc.messages.sampling import NoiseKey
from models.backends.cuda import CudaBackend
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepRow
from models.registry import load_model
from ssd_pipe.config import Mode, PipelineConfig, config_from_mapping
from tests.models.tiny import make_tiny, perturbed, random_tokens
from tests.rounds.local_pipeline import LocalPipeline
from tests.sampling.reference import P_VALUE, chi_square, kept_tokens, target_probs

K, BLOCK, ROWS, VOCAB = 2, 4, 32, 7
SEQUENCES = 6000
FILTERED = NoiseKey(0, 0.9, 0.9, 4, 0.03)


def settings(rows: int, **speculation: Any) -> PipelineConfig:
    return config_from_mapping(
        {
            "speculation": {"k": K, "fan_out": 2} | speculation,
            "scheduler": {"max_num_seqs": rows, "max_model_len": 60, "max_batched_tokens": 1024},
            "cache": {"block_size": BLOCK, "prefix_caching": False},
        }
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = make_tiny(folder, vocab_size=VOCAB, initializer_range=0.12)
    return target, perturbed(target, folder / "near", 0.15)


def pipeline(
    pair: tuple[Path, Path], mode: Mode, config: PipelineConfig, blocks: int = 600
) -> LocalPipeline:
    backend = CudaBackend("cuda", torch.bfloat16)
    return LocalPipeline(mode, *pair, config, blocks=blocks, backend=backend, graphs=True)


def with_key(key: NoiseKey, seed: int) -> NoiseKey:
    return NoiseKey(seed, key.temperature, key.top_p, key.top_k, key.min_p)


def emitted(
    pair: tuple[Path, Path], mode: Mode, order: Sequence[int], keys: dict[int, NoiseKey]
) -> dict[int, list[int]]:
    """Tokens after 12 rounds of rows that all start together and stay; every step is a graph."""
    running = pipeline(pair, mode, settings(4))
    for rid in order:
        prompt = random_tokens(1 if mode == "ar" else K + 1, VOCAB, rid)
        running.add(rid, prompt, 45, keys[rid])
    for _ in range(12):
        running.step()
    return running.outputs


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_order_and_number_of_the_rows_change_nothing(pair: tuple[Path, Path], mode: Mode) -> None:
    keys = {0: NoiseKey(), 1: NoiseKey(5, 1.0), 2: with_key(FILTERED, 6), 3: NoiseKey(7, 0.8)}
    first = emitted(pair, mode, [0, 1, 2], keys)
    for order in ([2, 0, 1], [3, 1, 0, 2], [0, 1, 2, 3]):
        again = emitted(pair, mode, order, keys)
        for rid in range(3):
            common = min(len(first[rid]), len(again[rid]))
            assert common >= 12
            assert again[rid][:common] == first[rid][:common]


def test_taking_turns_and_running_side_by_side_emit_the_same(pair: tuple[Path, Path]) -> None:
    keys = {0: NoiseKey(), 1: NoiseKey(5, 1.0), 2: with_key(FILTERED, 6)}
    turns, beside = (emitted(pair, mode, [0, 1, 2], keys) for mode in ("sd", "ssd"))
    for rid in keys:
        common = min(len(turns[rid]), len(beside[rid]))
        assert turns[rid][:common] == beside[rid][:common]


def contexts(target: Path) -> Iterator[tuple[list[int], list[list[float]]]]:
    """Prompts, and the target's logits after each and after each with one token more, computed
    by graphs of the shape that rounds use."""
    model = load_model(target, backend=CudaBackend("cuda", torch.bfloat16))
    kv = model.make_kv(ROWS * 2, BLOCK)
    runner = GraphRunner(model, kv, ROWS, 2 * BLOCK)
    tables = [[2 * i, 2 * i + 1] for i in range(ROWS)]
    for seed in range(2000):
        prompt = random_tokens(K + 1, VOCAB, seed)
        out = runner.run([StepRow(table, 0, prompt) for table in tables], K + 1)
        logits = [out.logits[0, K].float().tolist()]
        out = runner.run([StepRow(t, K + 1, [i % VOCAB]) for i, t in enumerate(tables)], K + 1)
        yield prompt, logits + [out.logits[i, 0].float().tolist() for i in range(VOCAB)]


def is_clear(logits: list[float], key: NoiseKey) -> bool:
    """Whether a little rounding, as between steps of different shapes, leaves the same tokens."""
    kept = kept_tokens(logits, key)
    for shift in (-1, 1):
        near = NoiseKey(
            0, key.temperature, key.top_p + 0.012 * shift, key.top_k, key.min_p * (1 + 0.05 * shift)
        )
        if kept_tokens(logits, near) != kept:
            return False
    dropped = [x for t, x in enumerate(logits) if t not in kept]
    return not dropped or min(logits[t] for t in kept) - max(dropped) > 0.06


@pytest.mark.parametrize("key", [NoiseKey(0, 1.0), FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
def test_the_first_tokens_have_the_targets_joint_distribution(
    pair: tuple[Path, Path], rule: str, key: NoiseKey
) -> None:
    filtered = key is FILTERED
    prompt, logits = next(
        (p, rows)
        for p, rows in contexts(pair[0])
        if not filtered or all(is_clear(row, key) for row in rows)
    )
    first, *second = (target_probs(row, key) for row in logits)
    running = pipeline(pair, "ssd", settings(ROWS, rule=rule, backup="jit"))
    counts = np.zeros((VOCAB, VOCAB))
    for begin in range(0, SEQUENCES, 500):
        for rid in range(begin, begin + 500):
            running.add(rid, prompt, 4, with_key(key, 1000 + rid))
        running.run()
    for tokens in running.outputs.values():
        counts[tokens[0], tokens[1]] += 1
    assert counts.sum() == SEQUENCES
    counters = running.planner.counters
    assert counters.hits > SEQUENCES / 10
    assert counters.accepted > SEQUENCES / 10
    assert chi_square(counts, first[:, None] * np.stack(second)) > P_VALUE
