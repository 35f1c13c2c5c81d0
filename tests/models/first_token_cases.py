"""The choice of an eager step, as after a prompt, against a graph's: under the interpreter in
float32, on a GPU (tests/gpu) in bfloat16 and bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ipc.messages.sampling import NoiseKey
from models.backends.cuda import CudaBackend, CudaOptions
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepRow
from models.cuda.head import head_logits
from models.cuda.noise import choose
from models.registry import load_model
from models.sequence_batch import build_batch
from ssd_pipe.sampling import noise, shared_noise
from ssd_pipe.sampling.filters import RowSampling
from tests.models.interpreter import accept_scalars_of_numpy_2_4
from tests.models.tiny import Family, make_tiny, random_tokens

accept_scalars_of_numpy_2_4()
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float32
FEW = 32 if GPU else 4
VOCAB, WIDTH = (256, 1280) if GPU else (33, 128)
LENGTHS = (5, 8, 19, 32) if GPU else (5,)
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2 if GPU else 1,
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH if GPU else 32,
}
PIECE, BLOCK = 4, 4
EQUAL = 139 / 128


def close_call(seed: int) -> torch.Tensor:
    """A head [VOCAB, WIDTH] whose products with a row of equal numbers, ``EQUAL`` times a power of
    two, differ by next to nothing but rounding: they are sums of the same terms in another order,
    half a float32 step apart, around a number that lies between two of bfloat16."""
    rng = np.random.default_rng(seed)

    def rounded(x: Any) -> Any:
        return torch.as_tensor(x).bfloat16().double().numpy()

    terms = list(rounded(np.abs(rng.normal(size=WIDTH - 4))))
    total = EQUAL * sum(terms)
    step = 2.0 ** (math.floor(math.log2(total)) - 7)
    middle = (math.floor(total / step) + 0.5) * step
    for _ in range(3):
        terms.append(rounded((middle - EQUAL * sum(terms)) / EQUAL))
    apart = step * 2.0**-17
    rows = [[*terms, rounded((v - VOCAB // 2) * apart / EQUAL)] for v in range(VOCAB)]
    return torch.from_numpy(rng.permuted(np.array(rows), axis=1))


@pytest.mark.parametrize("rows", [0, 1, FEW, FEW + 1])
def test_the_head_of_an_eager_step_chooses_as_a_graph_does(tmp_path: Path, rows: int) -> None:
    """Rounding alone decides; beyond ``few_tokens`` rows both leave the product to cuBLAS."""
    backend = CudaBackend(DEVICE, DTYPE, CudaOptions(few_tokens=FEW))
    model = load_model(make_tiny(tmp_path, **SHAPE), backend=backend)
    scale = EQUAL * 2.0 ** (torch.arange(rows) % 5)
    hidden = scale[:, None].expand(rows, WIDTH).to(DEVICE, DTYPE).contiguous()
    keys = noise.keys_to_tensor(np.arange(rows, dtype=np.uint64)).to(DEVICE)
    greedy = torch.zeros(rows, device=DEVICE)
    for seed, vocab in enumerate((0, VOCAB - 7, 0, VOCAB - 7)):
        model.head.weight = backend.pack(close_call(seed))
        wanted = choose(head_logits(model, hidden, vocab), keys, greedy)
        assert model.head_argmax(hidden, greedy, keys, vocab).tolist() == wanted.tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3"] if GPU else ["qwen3"])
def test_first_tokens_are_the_same_from_an_eager_prompt_and_from_graphs(
    tmp_path: Path, family: Family
) -> None:
    """A prompt read in one eager pass, and in pieces by graphs as after a prefix-cache hit. (What
    numpy's products give a row depends on its place, so the interpreter shows less.)"""
    backend = CudaBackend(DEVICE, DTYPE, CudaOptions(split=16))
    model = load_model(make_tiny(tmp_path, family, **SHAPE), backend=backend)
    kv = model.make_kv(16, BLOCK)
    eager, graphed = range(8), range(8, 16)
    runner = GraphRunner(model, kv, 1, len(graphed) * BLOCK)
    for length in LENGTHS:
        key = NoiseKey(length, float(length % 2))
        text = random_tokens(length, VOCAB, length)
        table = eager[: -(-length // BLOCK)]
        hidden = model.forward(build_batch([(table, 0, text, length - 1)], BLOCK, DEVICE), kv)
        logits = model.logits(hidden)
        first = shared_noise.choose_from(model, hidden, RowSampling.from_keys([key], [1]), [length])
        for at in range(0, length, PIECE):
            piece = text[at : at + PIECE]
            out = runner.run([StepRow(graphed, at, piece, key.seed, key.temperature)], PIECE)
        last = (length - 1) % PIECE
        assert logits is not None
        limit = 0.0 if GPU else 1e-5
        torch.testing.assert_close(out.logits[0, last].float(), logits[0], rtol=limit, atol=limit)
        assert int(out.chosen[0, last]) == int(first[0])
