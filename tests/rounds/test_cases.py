"""Failures people have reported of speculative decoding, provoked in AR, SD and SSD.

Rounds in one thread; ``tests/test_cases.py`` has those that need whole pipelines.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from ipc.messages.sampling import NoiseKey, Processors
from ipc.messages.target import StepPlan
from ssd_pipe.sampling.filters import RowSampling
from ssd_pipe.sampling.noise import SHARED, gumbel_argmax, round_stream
from tests.rounds.local_pipeline import LocalHandover, LocalPipeline
from tests.rounds.test_rounds import KEYS, TOKENS, expected, prompts, settings

torch.set_num_threads(1)
MODES = pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
K = 4
VOCAB = 61


@MODES
@pytest.mark.parametrize("place", range(1, K + 3))
@pytest.mark.parametrize("beyond", [0, 2])
def test_a_stop_token_before_max_tokens_in_one_chain(
    target: Path, drafts: dict[str, Path], mode: Any, place: int, beyond: int
) -> None:
    """Both are inside the accepted chain; where they fall together it is a stop as well."""
    prompt = prompts(1)[0]
    whole = expected(target, tuple(prompt), KEYS["sampled"], TOKENS)
    end = whole.index(whole[place]) + 1
    pipeline = LocalPipeline(mode, target, drafts["same"], settings(), blocks=80)
    pipeline.add(0, prompt, end + beyond, KEYS["sampled"], [whole[place]], logprobs=0)
    assert pipeline.run()[0] == whole[:end]
    assert pipeline.finish[0] == "stop"
    assert len(pipeline.logprobs[0]) == end


@MODES
def test_any_of_several_stop_ids_ends_it(target: Path, drafts: dict[str, Path], mode: Any) -> None:
    prompt = prompts(1)[0]
    whole = expected(target, tuple(prompt), KEYS["sampled"], TOKENS)
    for places in ((9, 6, 3), (12, 5), (2, 20, 8)):
        stops = [whole[place] for place in places]
        end = min(whole.index(stop) for stop in stops) + 1
        pipeline = LocalPipeline(mode, target, drafts["near"], settings(), blocks=80)
        pipeline.add(0, prompt, TOKENS, KEYS["sampled"], stops)
        assert pipeline.run()[0] == whole[:end]
        assert pipeline.finish[0] == "stop"


@MODES
@pytest.mark.parametrize(("draft", "name"), [("same", "greedy"), ("near", "sampled")])
def test_a_prompt_again_after_acceptances_that_crossed_blocks(
    target: Path, drafts: dict[str, Path], mode: Any, draft: str, name: str
) -> None:
    """Blocks hold four tokens, a round up to five: what was cached is what a cold start has."""
    prompt, key = prompts(3)[2], KEYS[name]
    pipeline = LocalPipeline(mode, target, drafts[draft], settings(), blocks=200)
    pipeline.add(0, prompt, TOKENS, key)
    first = list(pipeline.run()[0])
    assert first == expected(target, tuple(prompt), key, TOKENS)
    for rid, cut in enumerate((0, 3, 5, 17), start=1):
        pipeline.add(rid, prompt + first[:cut], 20, key)
        assert pipeline.run()[rid] == first[cut : cut + 20], cut
    assert pipeline.target_blocks.hit_tokens > 0
    assert pipeline.target_blocks.num_free == 200


def test_fifty_prompts_with_and_without_speculation(target: Path, drafts: dict[str, Path]) -> None:
    rng = random.Random(50)
    texts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))] for _ in range(50)]
    answers = []
    for mode in ("ar", "sd", "ssd"):
        config = settings()
        pipeline = LocalPipeline(mode, target, drafts["near"], config, blocks=400, haste=0.3)
        for rid, text in enumerate(texts):
            pipeline.add(rid, text, 12)
        answers.append(dict(pipeline.run()))
    assert answers[0] == answers[1] == answers[2]


class KeptHandover(LocalHandover):
    """Keeps what was handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[int, int], np.ndarray] = {}

    def put(self, slot: int, number: int, rows: np.ndarray | None) -> None:
        super().put(slot, number, rows)
        if rows is not None:
            self.kept[slot, number] = rows.copy()


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("c", [1.0, 0.4])
def test_the_q_that_judges_is_the_q_that_sampled(
    target: Path, drafts: dict[str, Path], mode: Any, c: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft computes in bfloat16. Every proposal is redrawn from the q it is judged by: under
    that q and the proposal's own noise, exactly that token must come out."""
    monkeypatch.setattr("tests.rounds.local_pipeline.LocalHandover", KeptHandover)
    config = settings(rule="rejection", backup="jit", saguaro_c=c)
    key = NoiseKey(seed=5, temperature=1.0)
    pipeline = LocalPipeline(
        mode, target, drafts["near"], config, blocks=400, haste=0.2, draft_dtype="bfloat16"
    )
    handover, run = pipeline.handover, pipeline.verifier.run
    assert isinstance(handover, KeptHandover)
    judged = 0

    def check(plan: StepPlan) -> Any:
        nonlocal judged
        for row in plan.rows:
            if not row.handover:
                continue
            q = torch.from_numpy(handover.kept[row.slot, row.handover])[: row.chain]
            assert q.dtype == torch.float32
            torch.testing.assert_close(q.sum(-1), torch.ones(row.chain), atol=1e-5, rtol=0)
            offsets = np.arange(row.chain)
            at = row.start + len(row.tokens) - row.chain + offsets
            sampling = RowSampling.from_keys([key] * row.chain)
            noise = sampling.noise_keys(at, round_stream(SHARED, offsets), q.device)
            assert gumbel_argmax(q.log(), noise).tolist() == row.tokens[-row.chain :]
            judged += row.chain
        return run(plan)

    monkeypatch.setattr(pipeline.verifier, "run", check)
    for rid, prompt in enumerate(prompts(5)):
        pipeline.add(rid, prompt, TOKENS, key)
    pipeline.run()
    assert judged > 100
    assert 0 < pipeline.planner.counters.accepted < pipeline.planner.counters.drafted


PROCESSORS = st.builds(
    Processors,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 5.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.8]),
    frequency_penalty=st.sampled_from([-1.0, 0.0, 2.0]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -3.0, 2.0, 100.0]), max_size=4
    ).map(lambda bias: tuple(bias.items())),
    min_tokens=st.integers(0, 12),
)
NOISE_KEYS = st.builds(
    NoiseKey,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 3.0, 100.0]),
    top_p=st.sampled_from([1e-6, 0.3, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 30, 2**31 - 1]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)


class Wanted:
    """A request in all its settings."""

    def __init__(
        self,
        prompt: list[int],
        count: int,
        key: NoiseKey,
        rules: Processors | None,
        stops: list[int],
    ) -> None:
        self.prompt, self.count, self.stops = prompt, count, stops
        if rules is not None:
            rules = Processors(
                len(prompt),
                rules.repetition_penalty,
                rules.presence_penalty,
                rules.frequency_penalty,
                rules.logit_bias,
                rules.min_tokens,
                tuple(stops),
            )
        self.key = NoiseKey(key.seed, key.temperature, key.top_p, key.top_k, key.min_p, rules)


WANTED = st.builds(
    Wanted,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    st.integers(1, 20),
    NOISE_KEYS,
    st.none() | PROCESSORS,
    st.lists(st.integers(0, VOCAB - 1), max_size=4, unique=True),
)


@examples(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    wanted=st.lists(WANTED, min_size=1, max_size=5),
    draft=st.sampled_from(["same", "near", "far"]),
    haste=st.sampled_from([0.0, 0.5, 0.9]),
    backup=st.sampled_from(["jit", "ngram"]),
    seed=st.integers(0, 99),
)
def test_any_settings_give_the_same_in_every_mode(
    target: Path,
    drafts: dict[str, Path],
    wanted: list[Wanted],
    draft: str,
    haste: float,
    backup: str,
    seed: int,
) -> None:
    found = []
    for mode in ("ar", "sd", "ssd"):
        pipeline = LocalPipeline(
            mode,
            target,
            drafts[draft],
            settings(backup=backup),
            blocks=120,
            haste=haste,
            seed=seed,
        )
        for rid, want in enumerate(wanted):
            pipeline.add(rid, want.prompt, want.count, want.key, want.stops, logprobs=1)
        outputs = pipeline.run()
        found.append((outputs, pipeline.finish))
        assert [len(pipeline.logprobs[r]) for r in outputs] == [len(o) for o in outputs.values()]
        assert pipeline.target_blocks.num_free == 120
    assert found[0] == found[1] == found[2]
