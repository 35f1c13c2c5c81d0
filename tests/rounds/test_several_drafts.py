"""Several draft workers: the same tokens, the same hits, each with its share of the branches."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ipc.messages.sampling import NoiseKey
from ssd_pipe.config import DraftSection, PipelineConfig
from ssd_pipe.engine.partition import owner
from tests.rounds.local_pipeline import LocalPipeline
from tests.rounds.test_rounds import KEYS, expected, prompts, settings

torch.set_num_threads(1)
TOKENS = 16
PROMPTS = prompts(4)


def several(workers: int, **speculation: Any) -> PipelineConfig:
    config = settings(**speculation)
    return msgspec.structs.replace(config, draft=DraftSection(workers=workers))


def run(
    workers: int, target: Path, draft: Path, key: NoiseKey, haste: float = 0.0, **speculation: Any
) -> LocalPipeline:
    config = several(workers, **speculation)
    pipeline = LocalPipeline("ssd", target, draft, config, blocks=400, haste=haste)
    for rid, prompt in enumerate(PROMPTS):
        pipeline.add(rid, prompt, TOKENS, key)
    pipeline.run()
    return pipeline


@pytest.mark.parametrize(("name", "haste"), [("greedy", 0.0), ("sampled", 0.4), ("filtered", 0.2)])
@pytest.mark.parametrize("workers", [2, 3])
def test_same_tokens(
    target: Path, drafts: dict[str, Path], workers: int, haste: float, name: str
) -> None:
    pipeline = run(workers, target, drafts["near"], KEYS[name], haste, fan_out=3)
    for rid, prompt in enumerate(PROMPTS):
        assert pipeline.outputs[rid] == expected(target, tuple(prompt), KEYS[name], TOKENS)


@pytest.mark.parametrize(
    ("rule", "allocation", "backup", "name"),
    [
        ("shared_noise", "confidence", "jit", "greedy"),
        ("shared_noise", "geometric", "ngram", "sampled"),
        ("rejection", "confidence", "jit", "sampled"),
    ],
)
def test_the_same_budget_hits_as_often_however_it_is_split(
    target: Path, drafts: dict[str, Path], rule: str, allocation: str, backup: str, name: str
) -> None:
    spec = {"rule": rule, "allocation": allocation, "backup": backup, "taper": 0.7}
    one, two, three = (
        run(workers, target, drafts["near"], KEYS[name], **spec).planner.counters
        for workers in (1, 2, 3)
    )
    assert min(one.hits, one.misses) > 10
    assert one == two == three


def test_every_worker_answers_and_none_has_more_than_its_share(
    target: Path, drafts: dict[str, Path]
) -> None:
    pipeline = LocalPipeline("ssd", target, drafts["near"], several(2, fan_out=3), blocks=400)
    for rid, prompt in enumerate(PROMPTS):
        pipeline.add(rid, prompt, TOKENS)
    answered: Counter[int] = Counter()
    while pipeline.scheduler.has_work:
        pipeline.step()
        sizes = [speculator.branches for speculator in pipeline.speculators]
        assert max(sizes) - min(sizes) <= len(PROMPTS)  # one a row
        answered.update(
            owner(request.slot, request.entry, 2)
            for request in pipeline.scheduler.running
            if request.entry >= 0
        )
    assert min(answered[0], answered[1]) > 4


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("haste", [0.0, 0.5])
def test_rejection_judges_with_what_the_right_worker_handed_over(
    target: Path, drafts: dict[str, Path], workers: int, haste: float
) -> None:
    """A draft equal to the target is always accepted, which takes the right q for every token."""
    config = several(workers, rule="rejection", backup="jit")
    pipeline = LocalPipeline("ssd", target, drafts["same"], config, blocks=400, haste=haste)
    for rid, prompt in enumerate(PROMPTS):
        pipeline.add(rid, prompt, TOKENS, NoiseKey(seed=rid, temperature=1.0))
    outputs = pipeline.run()
    assert [len(tokens) for tokens in outputs.values()] == [TOKENS] * len(PROMPTS)
    counters = pipeline.planner.counters
    assert counters.accepted == counters.drafted > 0
    assert counters.hits > 0


@pytest.mark.parametrize("seed", range(2))
def test_aborts_and_preemption_give_every_block_of_every_worker_back(
    target: Path, drafts: dict[str, Path], seed: int
) -> None:
    pipeline = LocalPipeline("ssd", target, drafts["near"], several(3), blocks=52, haste=0.4)
    rng = random.Random(seed)
    for rid, prompt in enumerate(prompts(7)):
        pipeline.add(rid, prompt, rng.randrange(1, TOKENS), KEYS["sampled"])
    for _ in range(10):
        pipeline.step()
        pipeline.abort(rng.randrange(7))
    outputs = pipeline.run()
    for rid, prompt in enumerate(prompts(7)):
        whole = expected(target, tuple(prompt), KEYS["sampled"], TOKENS)
        assert outputs[rid] == whole[: len(outputs[rid])]
    assert pipeline.target_blocks.num_free == 52
    assert [blocks.num_free for blocks in pipeline.all_draft_blocks] == [52] * 3


def test_a_late_worker_costs_hits_and_nothing_else(target: Path, drafts: dict[str, Path]) -> None:
    config = several(2, fan_out=3)
    pipeline = LocalPipeline("ssd", target, drafts["near"], config, blocks=400, late=1)
    for rid, prompt in enumerate(PROMPTS):
        pipeline.add(rid, prompt, TOKENS, KEYS["sampled"])
    outputs = pipeline.run()
    for rid, prompt in enumerate(PROMPTS):
        assert outputs[rid] == expected(target, tuple(prompt), KEYS["sampled"], TOKENS)
    whole = run(2, target, drafts["near"], KEYS["sampled"], fan_out=3).planner.counters
    late = pipeline.planner.counters
    assert 0 < late.hits / (late.hits + late.misses) < whole.hits / (whole.hits + whole.misses)
    assert [blocks.num_free for blocks in pipeline.all_draft_blocks] == [400, 400]
