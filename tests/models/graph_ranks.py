"""A target's steps on graphs, alone or as one of several ranks; what each rank runs in a process.

With TRITON_INTERPRET=1 and gloo on a CPU, with NCCL on GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ipc.messages.sampling import NoiseKey
from ipc.messages.target import SeqStart, StepPlan, StepRow
from models.backends.cuda import CudaBackend, CudaOptions
from models.parallel import TensorParallel
from models.registry import load_model
from ssd_pipe.verification.graphed import GraphedSteps
from ssd_pipe.verification.verifier import Verifier
from tests.models.interpreter import accept_scalars_of_numpy_2_4
from tests.models.tiny import random_tokens

BLOCK, BLOCKS, WIDTH, POSITIONS = 4, 24, 3, 32
KEYS = [NoiseKey(), NoiseKey(seed=3, temperature=1.0), NoiseKey(4, 1.0, 0.8, 7, 0.01)]


def plans(vocab: int) -> list[StepPlan]:
    """A long prompt beside a short one, then chains of every kind of row, then a long one more."""
    prompts = [random_tokens(n, vocab, n) for n in (9, 2, 3)]
    tables = [[8 * i + j for j in range(8)] for i in range(3)]
    begin = [SeqStart(i, i, key) for i, key in enumerate(KEYS)]
    first = StepPlan(
        1,
        [
            StepRow(i, 0, p, 0, True, t)
            for i, (p, t) in enumerate(zip(prompts, tables, strict=True))
        ],
        begin,
    )
    chains = [
        StepRow(i, len(p), random_tokens(WIDTH, vocab, 20 + i), WIDTH - 1, True, [])
        for i, p in enumerate(prompts)
    ]
    longer = random_tokens(7, vocab, 30)
    last = [StepRow(0, 12, longer, 0, False, []), StepRow(1, 5, [1, 2], 1, True, [])]
    return [first, StepPlan(2, chains), StepPlan(3, last)]


def outcomes_of(folder: Path, tp: TensorParallel, backend: CudaBackend) -> dict[str, Any]:
    """Outcomes of every plan (rank 0's alone mean something), and what the graphs of this rank
    chose."""
    model = load_model(folder, backend=backend, tp=tp)
    kv = model.make_kv(BLOCKS, BLOCK)
    steps = GraphedSteps(model, kv, 3, POSITIONS, (WIDTH,))
    verifier = Verifier(model, kv, BLOCK, "shared_noise", lambda *_: None, None, steps)
    found: dict[str, Any] = {"outcomes": [], "chosen": []}
    for plan in plans(model.config.vocab_size):
        verified = verifier.run(plan)
        found["outcomes"].append([(o.accepted, o.token) for o in verified.outcomes])
        found["chosen"].append(steps.choices())
    return found


def rank_main(rank: int, size: int, folder: str, device: str, dtype: str) -> None:
    """Leaves ``rank-N.json`` in ``folder``, where the model is."""
    accept_scalars_of_numpy_2_4()
    torch.set_num_threads(1)
    where = torch.device(device if device == "cpu" else f"{device}:{rank}")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    store = f"file://{folder}/rendezvous"
    tp = TensorParallel.create(rank, size, store, where, timeout=60)
    backend = CudaBackend(where, getattr(torch, dtype), CudaOptions(split=16))
    found = outcomes_of(Path(folder), tp, backend)
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))
    tp.close()
