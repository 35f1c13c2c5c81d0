"""The CUDA model path on a real GPU; ``python -m bench.gpu_model`` does the same and times it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: torch.cuda.is_available() is false", allow_module_level=True)
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from bench import gpu_checks
from bench.gpu_common import Report
from bench.gpu_graph_checks import check_graphs
from models.backends import make_backend
from models.backends.cuda import CudaBackend, CudaOptions
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepRow
from models.loader import build_transformer
from models.parallel import TensorParallel


@pytest.mark.parametrize(
    "section",
    [
        gpu_checks.check_kernels,
        gpu_checks.check_attention,
        gpu_checks.check_models,
        check_graphs,
    ],
)
def test_every_error_is_within_its_limit(section: Callable[[Report], None], tmp_path: Path) -> None:
    report = Report(tmp_path / "checks.json")
    with torch.inference_mode():
        section(report)
    rows = report.data["sections"]["check"]
    assert rows
    assert [row for row in rows if not row.get("ok", True)] == []


def test_a_gpu_gets_the_cuda_backend() -> None:
    assert make_backend("auto", "cuda", "bfloat16").name == "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_mates(dtype: torch.dtype) -> None:
    """Same bucket, other mates, other order: bitwise the same logits."""
    config = gpu_checks.small_shapes()["llama"]
    backend = CudaBackend("cuda", dtype, CudaOptions(split=64))
    model = build_transformer(
        config, gpu_checks.WideWeights(dtype, 1), backend, TensorParallel(), 1024
    )
    kv = model.make_kv(64, 16)
    runner = GraphRunner(model, kv, 4, 512)
    tables = [list(range(i * 16, i * 16 + 16)) for i in range(4)]
    texts = [[(7 * i + 3 * j) % config.vocab_size for j in range(200)] for i in range(4)]
    for i, table in enumerate(tables):
        for at in range(0, 150 + 10 * i, 10):
            runner.run([StepRow(table, at, texts[i][at : at + 10])], 10)

    def row(i: int) -> StepRow:
        at = 150 + 10 * i
        return StepRow(tables[i], at, texts[i][at : at + 2], seed=i, temperature=1.0)

    first = runner.run([row(0), row(1), row(2)], 2).logits[:3].clone()
    again = runner.run([row(3), row(2), row(0), row(1)], 2).logits.clone()
    assert torch.equal(first[0], again[2])
    assert torch.equal(first[1], again[3])
    assert torch.equal(first[2], again[1])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_token_gets_the_same_from_a_step_of_any_width(family: str) -> None:
    """bfloat16 logits of tokens fed one at a time, eight at a time and three rows at a time are
    bitwise equal, so that verification is exact."""
    config = replace(gpu_checks.small_shapes()[family], hidden_size=1280)
    backend = CudaBackend("cuda", torch.bfloat16, CudaOptions(split=64))
    weights = gpu_checks.WideWeights(torch.bfloat16, 1)
    model = build_transformer(config, weights, backend, TensorParallel(), 1024)
    kv = model.make_kv(96, 16)
    runner = GraphRunner(model, kv, 4, 512)
    tables = [list(range(i * 24, i * 24 + 24)) for i in range(4)]
    text = [(7 * j * j + 3 * j) % config.vocab_size for j in range(200)]

    def fed(table: list[int], start: int, width: int, mates: int = 0) -> torch.Tensor:
        parts = []
        for at in range(start, 200, width):
            row = StepRow(table, at, text[at : at + width])
            others = [StepRow(tables[3], 0, text[:width])] * mates
            out = runner.run([*others, row], width)
            parts.append(out.logits[mates].clone())
        return torch.cat(parts)

    for table in tables[:3]:
        fed(table, 0, 8)
    want = fed(tables[0], 120, 1)
    assert torch.equal(fed(tables[1], 120, 8), want)
    assert torch.equal(fed(tables[2], 120, 8, mates=2), want)
