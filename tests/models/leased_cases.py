"""Cases of test_triton_interpret: leased rounds, first the kernels alone, then whole pipelines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ipc import round_records as rr
from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Lease, RowLease
from models.cuda.rounds import layout
from ssd_pipe.config import config_from_mapping
from ssd_pipe.verification.leased import LeasedRounds
from tests.models.leased_kernel_cases import *  # noqa: F403
from tests.models.leased_kernel_cases import Bench
from tests.models.tiny import make_tiny, perturbed, random_tokens
from tests.models.triton_cases import PLAIN, SMALL, backend
from tests.rounds.leased_pipeline import LeasedPipeline
from tests.rounds.local_pipeline import LocalPipeline


@pytest.mark.parametrize(
    ("haste", "backup", "vocab"),
    [(0.0, "auto", 64), (0.3, "ngram", 13)],
    ids=["in time, forked on the GPU", "hasty, forked on the host"],
)
def test_leased_rounds_emit_what_the_target_alone_does(
    tmp_path: Path, haste: float, backup: str, vocab: int
) -> None:
    """Greedy and sampled rows, one that stops early, and a filtered one that ends every lease."""
    target = make_tiny(tmp_path, "llama", **SMALL | {"vocab_size": vocab})
    draft = perturbed(target, tmp_path / "near", 0.15)
    config = config_from_mapping(
        {
            "speculation": {"k": 2, "fan_out": 2, "backup": backup},
            "scheduler": {"max_num_seqs": 2, "max_model_len": 40, "max_batched_tokens": 16},
            "cache": {"block_size": 4},
        }
    )
    keys = [NoiseKey(), NoiseKey(seed=3, temperature=1.0), NoiseKey(4, 1.0, 0.8)]
    texts = [random_tokens(n, vocab, n) for n in (3, 9, 5)]

    def emitted(pipeline: LocalPipeline) -> tuple[dict[int, list[int]], dict[int, str]]:
        for rid, (text, key) in enumerate(zip(texts, keys, strict=True)):
            pipeline.add(rid, text, (6, 4, 2)[rid], key, [7] if rid == 1 else [])
        outputs = pipeline.run()
        blocks = pipeline.target_blocks
        assert blocks.num_free == blocks.num_blocks
        return outputs, pipeline.finish

    leased = LeasedPipeline(
        target,
        draft,
        config,
        vocab_size=vocab,
        backend=backend(PLAIN),
        haste=haste,
        recall=haste,
    )
    alone = emitted(LocalPipeline("ar", target, draft, config))
    assert emitted(leased) == alone
    assert leased.leased >= 3
    counters = leased.planner.counters
    assert haste or min(counters.hits, counters.accepted) > 0
    assert leased.draft_blocks.num_free == leased.draft_blocks.num_blocks


def test_glue_passes_launched_before_the_outcome_lead_to_the_same_rounds(tmp_path: Path) -> None:
    target = make_tiny(tmp_path, "llama", **SMALL | {"vocab_size": 16})
    draft = perturbed(target, tmp_path / "near", 0.3)
    config = config_from_mapping(
        {
            "speculation": {"k": 2, "fan_out": 1, "backup": "jit"},
            "scheduler": {"max_num_seqs": 1, "max_model_len": 40, "max_batched_tokens": 16},
            "cache": {"block_size": 4},
        }
    )
    how = {"vocab_size": 16, "backend": backend(PLAIN)}
    ahead = LeasedPipeline(target, draft, config, **how)
    behind = LeasedPipeline(target, draft, config, **how, follow=False)
    alone = LocalPipeline("ar", target, draft, config)
    for pipeline in (alone, ahead, behind):
        pipeline.add(0, random_tokens(5, 16, 4), 10, NoiseKey(seed=4, temperature=1.0))
        pipeline.run()
    assert ahead.outputs == behind.outputs == alone.outputs
    assert ahead.planner.counters == behind.planner.counters
    assert min(ahead.verdicts[verdict] for verdict in ("HIT", "MISS")) > 0
    assert not behind.verdicts
    assert ahead.draft_blocks.num_free == ahead.draft_blocks.num_blocks


def test_leases_load_what_the_kernels_read() -> None:
    bench = Bench()
    leased = LeasedRounds(bench.tables, torch.device("cpu"), False)
    row = RowLease(prefix_hash=2**64 - 1, left=9, stop_ids=[3, 5], draws=[4, 1])
    leased.load(Lease(11, 2, 5, 7, 8, [row, RowLease(1, 2)]), [3, 0])
    state = leased._staging.tensors
    assert state["rows"][0].tolist()[:5] == [layout.RUN, 11, -1, 9, 3]
    assert state["rows"][0].tolist()[layout.STATE_HEAD :] == [3, 5] + [-1] * (rr.MAX_STOPS - 2)
    assert state["rows"][1].tolist()[:5] == [layout.RUN, 11, 1, 2, 0]
    assert state["lease"].tolist()[:4] == [5, 7000, 8000, 11]
    assert state["draws"][:2, 0].tolist() == [4, 1]
    leased.clear()
    assert not state["rows"].any()
