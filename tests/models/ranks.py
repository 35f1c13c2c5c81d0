"""What the ranks of test_parallel run in their own processes; imports no transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from models.parallel import TensorParallel
from models.registry import load_model
from models.sequence_batch import build_batch
from ssd_pipe.errors import PeerLost
from tests.models.tiny import random_tokens

BLOCK = 4
TABLE = [5, 2, 7, 0, 3, 6, 1, 4]


def logits_of(folder: Path, tp: TensorParallel) -> torch.Tensor | None:
    """A prefill, a chunk without logits and a decode step, one after another."""
    model = load_model(folder, backend="reference", tp=tp)
    kv = model.make_kv(len(TABLE), BLOCK)
    tokens = random_tokens(24, model.config.vocab_size)
    parts = []
    for start, stop, first in [(0, 11, 3), (11, 22, 11), (22, 24, 0)]:
        batch = build_batch([(TABLE, start, tokens[start:stop], first)], BLOCK)
        parts.append(model.logits(model.forward(batch, kv)))
    if tp.rank:
        assert parts == [None, None, None]
        return None
    return torch.cat([part for part in parts if part is not None])


def rank_main(rank: int, folder: str, names: list[str]) -> None:
    """Rank 0 leaves its logits in ``NAME.pt``, and in ``lost`` what it hears when rank 1 left."""
    torch.set_num_threads(1)
    tp = TensorParallel.create(rank, 2, f"file://{folder}/rendezvous", timeout=60)
    for name in names:
        logits = logits_of(Path(folder) / name, tp)
        if logits is not None:
            torch.save(logits, Path(folder) / f"{name}.pt")
    if rank == 1:
        tp.close()
        return
    try:
        tp.all_reduce(torch.ones(1))
    except PeerLost as error:
        (Path(folder) / "lost").write_text(str(error))
    tp.close()
