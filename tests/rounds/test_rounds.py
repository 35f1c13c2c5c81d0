"""AR, SD and SSD emit the same tokens, whatever the draft, the batch, and who is in a hurry."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ipc.messages.draft import DraftPlan
from ipc.messages.sampling import NoiseKey
from models.registry import load_model
from models.sequence_batch import BatchRow, build_batch
from ssd_pipe.config import PipelineConfig, config_from_mapping
from ssd_pipe.engine.blocks import BlockTable
from ssd_pipe.engine.effort import OFF, Effort, neighbours
from ssd_pipe.sampling.shared_noise import judge
from tests.rounds.local_pipeline import LocalPipeline

torch.set_num_threads(1)
TOKENS = 40


def settings(**speculation: Any) -> PipelineConfig:
    return config_from_mapping(
        {
            "speculation": {"k": 4, "fan_out": 2} | speculation,
            "scheduler": {"max_num_seqs": 4, "max_model_len": 200, "max_batched_tokens": 32},
            "cache": {"block_size": 4},
        }
    )


def prompts(n: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 61) for _ in range(rng.randrange(1, 60))] for _ in range(n)]


KEYS = {
    "greedy": NoiseKey(),
    "sampled": NoiseKey(seed=11, temperature=0.8),
    "filtered": NoiseKey(seed=12, temperature=1.0, top_p=0.9, top_k=20, min_p=0.02),
}


@cache
def expected(target: Path, prompt: tuple[int, ...], key: NoiseKey, count: int) -> list[int]:
    """Token by token, no pipeline: prefill of everything so far, then the acceptance rule."""
    model = load_model(target, backend="reference")
    kv = model.make_kv(64, 4)
    tokens = list(prompt)
    for _ in range(count):
        row = BatchRow(list(range(64)), 0, tokens, len(tokens) - 1)
        logits = model.logits(model.forward(build_batch([row], 4), kv))
        assert logits is not None
        [(_, token)] = judge(logits, [[]], [key], [len(tokens)])
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("draft", ["same", "near", "far"])
def test_same_tokens(
    target: Path, drafts: dict[str, Path], mode: Any, draft: str, name: str
) -> None:
    key = KEYS[name]
    pipeline = LocalPipeline(mode, target, drafts[draft], settings(), blocks=400)
    for rid, prompt in enumerate(prompts(6)):
        pipeline.add(rid, prompt, TOKENS, key)
    outputs = pipeline.run()
    for rid, prompt in enumerate(prompts(6)):
        assert outputs[rid] == expected(target, tuple(prompt), key, TOKENS)
        assert pipeline.finish[rid] == "length"


@pytest.mark.parametrize("haste", [0.3, 0.9])
@pytest.mark.parametrize("backup", ["auto", "jit", "ngram", "none"])
@pytest.mark.parametrize("allocation", ["uniform", "geometric", "confidence"])
def test_hurry_backups_and_allocations_change_nothing(
    target: Path, drafts: dict[str, Path], haste: float, backup: str, allocation: str
) -> None:
    config = settings(backup=backup, allocation=allocation)
    pipeline = LocalPipeline("ssd", target, drafts["near"], config, blocks=400, haste=haste)
    for rid, prompt in enumerate(prompts(5)):
        pipeline.add(rid, prompt, TOKENS, KEYS["sampled"])
    outputs = pipeline.run()
    for rid, prompt in enumerate(prompts(5)):
        assert outputs[rid] == expected(target, tuple(prompt), KEYS["sampled"], TOKENS)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("allocation", ["uniform", "geometric", "confidence", "fixed"])
@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
def test_any_effort_each_round_changes_nothing(
    target: Path, drafts: dict[str, Path], mode: Any, allocation: str, rule: str
) -> None:
    """Chain length, branches, and whether to speculate, changed at random between rounds."""
    config = settings(allocation=allocation, rule=rule)
    pipeline = LocalPipeline(mode, target, drafts["near"], config, blocks=400, haste=0.2, seed=7)
    pipeline.efforts = list(neighbours(mode, 4, 10))
    key = KEYS["sampled"] if rule == "shared_noise" else NoiseKey()
    for rid, prompt in enumerate(prompts(6)):
        pipeline.add(rid, prompt, TOKENS, key)
    outputs = pipeline.run()
    for rid, prompt in enumerate(prompts(6)):
        assert outputs[rid] == expected(target, tuple(prompt), key, TOKENS)
    assert pipeline.planner.counters.accepted > 0
    assert pipeline.draft_blocks.num_free == pipeline.target_blocks.num_free == 400


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_rejection_stays_right_when_the_effort_changes(
    target: Path, drafts: dict[str, Path], mode: Any
) -> None:
    """The right draft is always accepted, which takes the right q for every token."""
    config = settings(rule="rejection", backup="jit")
    pipeline = LocalPipeline(mode, target, drafts["same"], config, blocks=400, seed=3)
    pipeline.efforts = [e for e in neighbours(mode, 4, 10) if e.k > 1] + [OFF]
    for rid, prompt in enumerate(prompts(5)):
        pipeline.add(rid, prompt, TOKENS, NoiseKey(seed=rid, temperature=1.0))
    pipeline.run()
    counters = pipeline.planner.counters
    assert counters.accepted == counters.drafted > 0


def test_a_branch_has_the_tokens_its_round_asks_for(target: Path, drafts: dict[str, Path]) -> None:
    pipeline = LocalPipeline("ssd", target, drafts["same"], settings(taper=1), blocks=80)
    pipeline.efforts = [Effort(2, 3)]
    pipeline.add(0, prompts(1)[0], 30)
    for _ in range(4):
        pipeline.step()
    cache = pipeline.cache
    assert cache is not None
    assert [cache.depth_of(0, entry) for entry in range(4)] == [2, 2, 2, 0]
    assert [cache.goal_of(0, entry) for entry in range(3)] == [2, 2, 2]
    counters = pipeline.planner.counters
    assert counters.drafted <= 2 * counters.rounds


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_preemption_loses_nothing(target: Path, drafts: dict[str, Path], mode: Any) -> None:
    pipeline = LocalPipeline(mode, target, drafts["near"], settings(), blocks=52)
    for rid, prompt in enumerate(prompts(8)):
        pipeline.add(rid, prompt, TOKENS)
    outputs = pipeline.run()
    assert pipeline.scheduler.preemptions > 0
    for rid, prompt in enumerate(prompts(8)):
        assert outputs[rid] == expected(target, tuple(prompt), NoiseKey(), TOKENS)


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("seed", range(4))
def test_aborts_give_every_block_back(
    target: Path, drafts: dict[str, Path], mode: Any, seed: int
) -> None:
    pipeline = LocalPipeline(mode, target, drafts["near"], settings(), blocks=80, haste=0.4)
    rng = random.Random(seed)
    for rid, prompt in enumerate(prompts(10)):
        pipeline.add(rid, prompt, rng.randrange(1, TOKENS), KEYS["sampled"])
    for _ in range(12):
        pipeline.step()
        pipeline.abort(rng.randrange(10))
    outputs = pipeline.run()
    for rid, prompt in enumerate(prompts(10)):
        whole = expected(target, tuple(prompt), KEYS["sampled"], TOKENS)
        assert outputs[rid] == whole[: len(outputs[rid])]
    assert pipeline.target_blocks.num_free == 80
    if mode != "ar":
        assert pipeline.draft_blocks.num_free == 80


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("place", range(8))
def test_stop_token_at_every_place_of_a_round(
    target: Path, drafts: dict[str, Path], mode: Any, place: int
) -> None:
    prompt = prompts(1)[0]
    whole = expected(target, tuple(prompt), KEYS["sampled"], TOKENS)
    stop = whole[place]
    end = whole.index(stop) + 1
    pipeline = LocalPipeline(mode, target, drafts["same"], settings(), blocks=80)
    pipeline.add(0, prompt, TOKENS, KEYS["sampled"], [stop])
    assert pipeline.run()[0] == whole[:end]
    assert pipeline.finish[0] == "stop"


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("limit", range(1, 9))
def test_max_tokens_is_exact(target: Path, drafts: dict[str, Path], mode: Any, limit: int) -> None:
    prompt = prompts(1)[0]
    pipeline = LocalPipeline(mode, target, drafts["same"], settings(), blocks=80)
    pipeline.add(0, prompt, limit)
    assert pipeline.run()[0] == expected(target, tuple(prompt), NoiseKey(), limit)


def test_the_right_draft_is_always_a_hit(target: Path, drafts: dict[str, Path]) -> None:
    config = settings(allocation="uniform")
    pipeline = LocalPipeline("ssd", target, drafts["same"], config, blocks=80)
    pipeline.add(0, prompts(1)[0], 60)
    pipeline.run()
    counters = pipeline.planner.counters
    assert counters.misses == 0
    assert counters.accepted == counters.drafted


def test_same_prompt_again_uses_the_prefix_cache(target: Path, drafts: dict[str, Path]) -> None:
    prompt = prompts(3)[2]
    pipeline = LocalPipeline("ssd", target, drafts["same"], settings(), blocks=80)
    pipeline.add(0, prompt, TOKENS)
    first = list(pipeline.run()[0])
    pipeline.add(1, prompt + first[:30], 10)
    assert pipeline.run()[1] == first[30:40]
    assert pipeline.target_blocks.hit_tokens > len(prompt)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("haste", [0.0, 0.5])
def test_rejection_judges_with_what_was_handed_over(
    target: Path, drafts: dict[str, Path], mode: Any, haste: float
) -> None:
    """A draft equal to the target is always accepted, which takes the right q for every token."""
    config = settings(rule="rejection", backup="jit")
    pipeline = LocalPipeline(mode, target, drafts["same"], config, blocks=400, haste=haste)
    for rid, prompt in enumerate(prompts(5)):
        pipeline.add(rid, prompt, TOKENS, NoiseKey(seed=rid, temperature=1.0))
    outputs = pipeline.run()
    assert [len(tokens) for tokens in outputs.values()] == [TOKENS] * 5
    counters = pipeline.planner.counters
    assert counters.accepted == counters.drafted > 0


def test_a_branch_knows_how_deep_it_will_get(target: Path, drafts: dict[str, Path]) -> None:
    config = settings(taper=0.5, fan_out=3)
    pipeline = LocalPipeline("ssd", target, drafts["same"], config, blocks=80)
    pipeline.add(0, prompts(1)[0], 30)
    for _ in range(3):
        pipeline.step()
    cache = pipeline.cache
    assert cache is not None
    goals = [cache.goal_of(0, entry) for entry in range(15)]
    assert goals == [cache.depth_of(0, entry) for entry in range(15)]
    assert goals == sorted(goals, reverse=True)
    assert goals[0] == 4
    assert goals[-1] == 1


@pytest.mark.parametrize(("workers", "scarce"), [(1, True), (2, False)])
def test_a_row_without_branches_is_announced_too(
    target: Path, drafts: dict[str, Path], workers: int, scarce: bool
) -> None:
    """Whoever looks for them must learn that none will come: of a trunk that cannot grow, and of a
    worker whose share is empty."""
    config = settings()
    config = replace(config, draft=replace(config.draft, workers=workers))
    pipeline = LocalPipeline("ssd", target, drafts["near"], config, blocks=400)
    assert pipeline.cache is not None
    assert pipeline.speculator is not None
    plans: list[DraftPlan] = []
    apply = pipeline.speculator.apply

    def noted(plan: DraftPlan) -> None:
        plans.append(plan)
        apply(plan)

    pipeline.speculator.apply = noted  # type: ignore[method-assign]
    pipeline.efforts = [Effort(2, 1)]
    prompt = prompts(1)[0]
    pipeline.add(0, prompt, TOKENS)
    without = 0
    while pipeline.scheduler.has_work:
        pipeline.step()
        if scarce and len(plans) == 3:  # nothing is left for what the trunk has no blocks for yet
            free = pipeline.draft_blocks.num_free
            pipeline.draft_blocks.allocate(BlockTable(), [], [], num_tokens=free * 4)
        for row in plans[-1].rows:
            assert pipeline.cache.announced(row.slot, row.prefix_hash)
            branches = [
                token
                for k in range(5)
                for token in pipeline.cache.recovery_tokens(row.slot, row.prefix_hash, k)
            ]
            without += len(branches) < workers
    assert without > 0
    assert pipeline.outputs[0] == expected(target, tuple(prompt), NoiseKey(), TOKENS)
