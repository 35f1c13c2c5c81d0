"""Bias, min_tokens, penalties, logprobs: AR, SD and SSD against a token-by-token reference."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ipc.messages.sampling import NoiseKey, Processors
from models.registry import load_model
from models.sequence_batch import BatchRow, build_batch
from models.transformer import Transformer
from ssd_pipe.sampling.shared_noise import judge
from tests.rounds.local_pipeline import LocalPipeline
from tests.rounds.test_rounds import prompts, settings

torch.set_num_threads(1)
TOKENS = 24
VOCAB = 61
PROMPTS = prompts(5)
STOPS = (5, 9, 17, 23, 31, 40, 44, 50, 58)
BIAS = tuple((t, 6.0 if t % 2 else -8.0) for t in range(3, 40, 6))

RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.8, "presence_penalty": -0.7},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.3},
    "bias": {"logit_bias": BIAS},
    "min_tokens": {"min_tokens": 11, "stop_ids": STOPS},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.6,
        "logit_bias": BIAS,
        "min_tokens": 7,
        "stop_ids": STOPS,
    },
}
NOISE = {
    "greedy": NoiseKey(),
    "sampled": NoiseKey(seed=11, temperature=1.1),
    "filtered": NoiseKey(seed=12, temperature=1.3, top_p=0.95, top_k=30, min_p=0.01),
}


def with_rules(noise: str, rules: str, prompt_len: int) -> NoiseKey:
    key = NOISE[noise]
    processors = Processors(prompt_len=prompt_len, **RULES[rules])
    return NoiseKey(key.seed, key.temperature, key.top_p, key.top_k, key.min_p, processors)


@cache
def reference_model(target: Path) -> tuple[Transformer, Any]:
    model = load_model(target, backend="reference")
    return model, model.make_kv(64, 4)


def raw_logits(target: Path, tokens: list[int]) -> torch.Tensor:
    """Of the token that follows, [1, V]: everything is fed again."""
    model, kv = reference_model(target)
    row = BatchRow(list(range(64)), 0, tokens, len(tokens) - 1)
    logits = model.logits(model.forward(build_batch([row], 4), kv))
    assert logits is not None
    return logits


def by_definition(logits: list[float], tokens: list[int], rules: Processors) -> list[float]:
    """One logit at a time, in float32, as vLLM's documentation words it."""
    f32 = np.float32
    output = tokens[rules.prompt_len :]
    bias = dict(rules.logit_bias)
    changed = []
    for token, logit in enumerate(logits):
        x = f32(logit)
        x += f32(bias.get(token, 0.0))
        if len(output) < rules.min_tokens and token in rules.stop_ids:
            x = f32(-math.inf)
        if token in tokens:
            r = f32(rules.repetition_penalty)
            x = x / r if x > 0 else x * r
        x -= f32(rules.frequency_penalty) * f32(output.count(token))
        x -= f32(rules.presence_penalty) * f32(token in output)
        changed.append(float(x))
    return changed


@cache
def expected(
    target: Path, prompt: tuple[int, ...], key: NoiseKey, count: int = TOKENS
) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens up to a stop id, and the raw log probabilities [V] each was chosen under."""
    tokens, rows = list(prompt), []
    rules = key.processors or Processors()
    for _ in range(count):
        logits = raw_logits(target, tokens)
        rows.append(torch.log_softmax(logits[0].double(), dim=-1))
        changed = torch.tensor([by_definition(logits[0].tolist(), tokens, rules)])
        [(_, token)] = judge(changed, [[]], [key], [len(tokens)])
        tokens.append(token)
        if token in rules.stop_ids:
            break
    return tokens[len(prompt) :], rows


def run(
    mode: Any, target: Path, draft: Path, keys: list[NoiseKey], logprobs: int = -1, **spec: Any
) -> LocalPipeline:
    haste = 0.3 if mode == "ssd" else 0.0
    pipeline = LocalPipeline(mode, target, draft, settings(**spec), blocks=300, haste=haste)
    for rid, (prompt, key) in enumerate(zip(PROMPTS, keys, strict=True)):
        stops = list(key.processors.stop_ids) if key.processors else []
        pipeline.add(rid, prompt, TOKENS, key, stops, logprobs if rid % 2 == 0 else -1)
    pipeline.run()
    return pipeline


@pytest.mark.parametrize(
    ("name", "noise"),
    [(name, "greedy" if i % 2 else "filtered") for i, name in enumerate(RULES)]
    + [("all", "greedy"), ("all", "sampled")],
)
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_same_tokens_as_by_definition(
    target: Path, drafts: dict[str, Path], mode: Any, name: str, noise: str
) -> None:
    keys = [with_rules(noise, name, len(prompt)) for prompt in PROMPTS]
    pipeline = run(mode, target, drafts["near"], keys)
    for rid, prompt in enumerate(PROMPTS):
        assert pipeline.outputs[rid] == expected(target, tuple(prompt), keys[rid])[0]


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_batch_mates_of_every_kind_leave_each_other_alone(
    target: Path, drafts: dict[str, Path], mode: Any
) -> None:
    kinds = [("greedy", "all"), ("sampled", "bias"), ("filtered", "all"), ("sampled", "repetition")]
    keys = [with_rules(noise, name, len(PROMPTS[i])) for i, (noise, name) in enumerate(kinds)]
    keys.append(NOISE["sampled"])
    pipeline = run(mode, target, drafts["near"], keys, logprobs=3)
    for rid, prompt in enumerate(PROMPTS):
        tokens, rows = expected(target, tuple(prompt), keys[rid])
        assert pipeline.outputs[rid] == tokens
        check_logprobs(pipeline, rid, rows, 3)


def check_logprobs(pipeline: LocalPipeline, rid: int, rows: list[torch.Tensor], count: int) -> None:
    """One entry per token, of the model's own distribution; none where not asked for."""
    entries, tokens = pipeline.logprobs[rid], pipeline.outputs[rid]
    if rid % 2:
        assert entries == []
        return
    assert len(entries) == len(tokens)
    for entry, token, row in zip(entries, tokens, rows, strict=True):
        order = row.argsort(descending=True).tolist()
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entry.rank == order.index(token) + 1
        assert entry.top_ids == order[:count]
        assert entry.top_logprobs == pytest.approx(row[entry.top_ids].tolist(), abs=1e-4)


@pytest.mark.parametrize("count", [0, 20])
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_logprobs_are_those_of_the_raw_distribution(
    target: Path, drafts: dict[str, Path], mode: Any, count: int
) -> None:
    keys = [NOISE["sampled"]] * len(PROMPTS)
    pipeline = run(mode, target, drafts["near"], keys, logprobs=count)
    for rid, prompt in enumerate(PROMPTS):
        tokens, rows = expected(target, tuple(prompt), keys[rid])
        assert pipeline.outputs[rid] == tokens
        check_logprobs(pipeline, rid, rows, count)


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_preemption_and_cached_prefixes_forget_no_count(
    target: Path, drafts: dict[str, Path], mode: Any
) -> None:
    long = [PROMPTS[0] * 3] * 3 + [PROMPTS[1]] * 3
    keys = [with_rules("sampled", "all", len(prompt)) for prompt in long]
    pipeline = LocalPipeline(mode, target, drafts["near"], settings(), blocks=52)
    for rid, (prompt, key) in enumerate(zip(long, keys, strict=True)):
        pipeline.add(rid, prompt, TOKENS, key, list(STOPS))
    outputs = pipeline.run()
    assert pipeline.target_blocks.hit_tokens > 0
    for rid, prompt in enumerate(long):
        assert outputs[rid] == expected(target, tuple(prompt), keys[rid])[0]


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("least", [1, 2, 3, 4, 5, 6])
def test_the_stop_token_comes_at_once_when_min_tokens_are_there(
    target: Path, drafts: dict[str, Path], mode: Any, least: int
) -> None:
    """A bias makes it the choice at every place; min_tokens alone holds it back."""
    rules = Processors(
        prompt_len=len(PROMPTS[0]), logit_bias=((7, 100.0),), min_tokens=least, stop_ids=(7, 8)
    )
    key = NoiseKey(processors=rules)
    pipeline = LocalPipeline(mode, target, drafts["same"], settings(), blocks=80)
    pipeline.add(0, PROMPTS[0], TOKENS, key, [7, 8])
    tokens = pipeline.run()[0]
    assert len(tokens) == least + 1
    assert tokens[-1] == 7
    assert pipeline.finish[0] == "stop"


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
@pytest.mark.parametrize("noise", NOISE)
def test_the_draft_does_to_its_logits_what_the_target_does(
    target: Path, drafts: dict[str, Path], mode: Any, rule: str, noise: str
) -> None:
    """So a draft equal to the target is always accepted, whatever changes from place to place."""
    keys = [with_rules(noise, "all", len(prompt)) for prompt in PROMPTS]
    pipeline = run(mode, target, drafts["same"], keys, rule=rule, backup="jit")
    counters = pipeline.planner.counters
    assert counters.accepted == counters.drafted > 0


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("place", range(6))
def test_logprobs_end_where_the_tokens_do(
    target: Path, drafts: dict[str, Path], mode: Any, place: int
) -> None:
    whole, _ = expected(target, tuple(PROMPTS[0]), NOISE["sampled"])
    stop = whole[place]
    pipeline = LocalPipeline(mode, target, drafts["same"], settings(), blocks=80)
    pipeline.add(0, PROMPTS[0], TOKENS, NOISE["sampled"], [stop], logprobs=1)
    pipeline.run()
    end = whole.index(stop) + 1
    assert pipeline.outputs[0] == whole[:end]
    assert len(pipeline.logprobs[0]) == end
