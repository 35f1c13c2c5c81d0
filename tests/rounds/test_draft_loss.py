"""A draft that comes and goes between any two steps changes no token and keeps no block."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ipc.messages.sampling import NoiseKey
from tests.rounds.local_pipeline import LocalPipeline
from tests.rounds.test_rounds import KEYS, TOKENS, expected, prompts, settings

torch.set_num_threads(1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize(
    ("rule", "name"),
    [("shared_noise", "greedy"), ("shared_noise", "sampled"), ("rejection", "greedy")],
)
def test_tokens_do_not_depend_on_when_the_draft_is_there(
    target: Path, drafts: dict[str, Path], mode: Any, rule: str, name: str, seed: int
) -> None:
    rng = random.Random(seed)
    config = settings(rule=rule)
    pipeline = LocalPipeline(mode, target, drafts["near"], config, blocks=400, haste=0.2, seed=seed)
    for rid, prompt in enumerate(prompts(6)):
        pipeline.add(rid, prompt, TOKENS, KEYS[name])
    while pipeline.scheduler.has_work:
        if rng.random() < 0.2:
            (pipeline.lose_draft if pipeline.planner.drafting else pipeline.find_draft)()
        pipeline.step()
    pipeline.find_draft()
    outputs = pipeline.run()
    for rid, prompt in enumerate(prompts(6)):
        assert outputs[rid] == expected(target, tuple(prompt), KEYS[name], TOKENS)
    assert pipeline.planner.counters.accepted > 0
    for blocks in (pipeline.target_blocks, pipeline.draft_blocks):
        assert blocks.num_free == blocks.num_blocks


@pytest.mark.parametrize("key", [NoiseKey(), NoiseKey(seed=4, temperature=1.0)])
def test_nothing_is_drafted_without_a_draft_and_hits_come_back_with_it(
    target: Path, drafts: dict[str, Path], key: NoiseKey
) -> None:
    config = settings(rule="rejection")
    pipeline = LocalPipeline("ssd", target, drafts["same"], config, blocks=400)
    for rid, prompt in enumerate(prompts(3)):
        pipeline.add(rid, prompt, 130, key)
    counters = pipeline.planner.counters

    def steps(count: int) -> tuple[int, int]:
        """Rounds with a chain, and hits, in so many steps."""
        rounds, hits = counters.rounds, counters.hits
        for _ in range(count):
            pipeline.step()
        return counters.rounds - rounds, counters.hits - hits

    assert min(steps(16)) > 0
    pipeline.lose_draft()
    assert steps(5) == (0, 0)
    pipeline.find_draft()
    assert min(steps(8)) > 0
