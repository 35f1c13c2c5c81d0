"""Glue passes that wait on the GPU for an outcome to come: leased rounds of one row, compiled."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: torch.cuda.is_available() is false", allow_module_level=True)
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from ipc.messages.sampling import NoiseKey
from models.backends.cuda import CudaBackend
from models.cuda.rounds.follow import Verdict
from ssd_pipe.config import config_from_mapping
from ssd_pipe.engine import leases
from tests.models.leased_kernel_cases import Bench, Follow
from tests.models.tiny import make_tiny, perturbed, random_tokens
from tests.rounds.leased_pipeline import LeasedPipeline
from tests.rounds.local_pipeline import LocalPipeline

VOCAB, K = 64, 3


def wait_for_verdict(ahead: Follow) -> Verdict:
    deadline = time.monotonic() + 20
    while (verdict := ahead.follower.verdict(7)) is None:
        assert time.monotonic() < deadline
    return verdict


def test_a_launch_waits_for_the_record_and_no_longer() -> None:
    # Kernels are loaded at their first launch, which would wait for those that run.
    Bench().settle([4, 5, 6], [4, 5, 9, 1])
    bench = Bench()
    bench.publish([(1, 9), (2, 9)], [[11, 12], [21, 22]], 7)
    ahead = Follow(bench)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ahead.launch()
    ended = torch.cuda.Event()
    ended.record(side)
    assert ahead.follower.verdict(7) is None
    assert not ended.query()
    bench.settle([4, 5, 6], [4, 5, 9, 1])
    assert wait_for_verdict(ahead) is Verdict.HIT
    torch.cuda.synchronize()
    assert ahead.tokens == [9, 12, 22]


def test_a_launch_that_is_called_off_ends() -> None:
    ahead = Follow(Bench())
    ahead.launch()
    assert ahead.follower.verdict(7) is None
    ahead.follower.call_off(6)
    assert ahead.follower.verdict(7) is None
    ahead.follower.call_off(7)
    assert wait_for_verdict(ahead) is Verdict.VOID
    torch.cuda.synchronize()
    assert ahead.tokens == []


@pytest.mark.parametrize("backup", ["jit", "ngram"])
@pytest.mark.parametrize("allocation", ["confidence", "uniform"])
@pytest.mark.parametrize("skip", [0.0, 0.2], ids=["in time", "late now and then"])
def test_leased_rounds_that_are_followed_emit_what_the_target_alone_does(
    tmp_path: Path,
    backup: str,
    allocation: str,
    skip: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A round for which the draft is too late is waited for in vain; a second would be a long time.
    monkeypatch.setattr(leases, "PATIENCE_US", 20_000)
    shape = {"hidden_size": 64, "head_dim": 64, "vocab_size": VOCAB}
    target = make_tiny(tmp_path, "llama", **shape)
    draft = perturbed(target, tmp_path / "near", 0.15)
    config = config_from_mapping(
        {
            "speculation": {"k": K, "fan_out": 3, "backup": backup, "allocation": allocation},
            "scheduler": {"max_num_seqs": 1, "max_model_len": 300, "max_batched_tokens": 64},
            "cache": {"block_size": 16},
        }
    )
    backend = CudaBackend("cuda", torch.bfloat16)
    leased = LeasedPipeline(
        target,
        draft,
        config,
        vocab_size=VOCAB,
        backend=backend,
        device="cuda",
        blocks=200,
        skip=skip,
    )
    alone = LocalPipeline("ar", target, draft, config, backend=backend, graphs=True, blocks=200)
    for pipeline in (alone, leased):
        for rid, key in enumerate((NoiseKey(), NoiseKey(seed=3, temperature=1.0)) * 2):
            pipeline.add(rid, random_tokens(5 + rid, VOCAB, rid), 250 - 60 * rid, key)
        pipeline.run()
    assert leased.outputs == alone.outputs
    assert min(leased.verdicts[verdict] for verdict in ("HIT", "MISS")) > 0
    assert leased.draft_blocks.num_free == leased.draft_blocks.num_blocks
