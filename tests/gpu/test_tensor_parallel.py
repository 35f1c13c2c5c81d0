"""Tensor parallelism by NCCL inside CUDA graphs, over two real GPUs."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip(f"needs 2 CUDA devices, not {torch.cuda.device_count()}", allow_module_level=True)

from models.backends.cuda import CudaBackend, CudaOptions
from models.parallel import TensorParallel
from tests.models.graph_ranks import outcomes_of, rank_main
from tests.models.tiny import make_tiny


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("qwen3", "float32"), ("llama", "bfloat16")]
)
def test_two_ranks_choose_alike_and_as_one_does(tmp_path: Path, family: str, dtype: str) -> None:
    folder = make_tiny(tmp_path, family, vocab_size=61)  # type: ignore[arg-type]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank_main, args=(r, 2, str(folder), "cuda", dtype), daemon=True)
        for r in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    assert [process.exitcode for process in ranks] == [0, 0]
    first, second = (json.loads((folder / f"rank-{r}.json").read_text()) for r in range(2))
    assert first["chosen"] == second["chosen"]
    assert second["outcomes"] == [[], [], []]
    if dtype == "float32":  # in bfloat16 two ranks round otherwise than one
        backend = CudaBackend("cuda:0", torch.float32, CudaOptions(split=16))
        alone = json.loads(json.dumps(outcomes_of(folder, TensorParallel(), backend)))
        assert first == alone
