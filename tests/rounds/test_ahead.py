"""With real models: a target that goes ahead emits what it would have emitted otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ipc.messages.sampling import NoiseKey, Processors
from ipc.messages.target import Ahead, RowOutcome, StepPlan
from ssd_pipe.engine.ahead import Aheads, Growing, follow_on
from ssd_pipe.engine.step import Step
from tests.rounds.local_pipeline import LocalPipeline
from tests.rounds.test_rounds import KEYS, TOKENS, expected, prompts
from tests.rounds.test_rounds import settings as pipeline_settings

torch.set_num_threads(1)


class AheadPipeline(LocalPipeline):
    """Goes ahead wherever it may. ``begun`` counts the steps that the target began."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.begun = 0
        self.aheads = Aheads(self.scheduler, self.planner, self.config.speculation)

    def step(self) -> None:
        self.scheduler.lookahead = self.planner.decide(self.scheduler.load).k
        step: Step | None = self.scheduler.schedule()
        if step is None:
            return
        handovers = self._speculate(step)
        plan = step.to_plan(handovers)
        while step is not None:
            step, plan = self._one(step, plan)

    def _speculate(self, step: Step) -> dict[int, int]:
        if not self.speculators:
            return {}
        room = {r.request.slot: self.scheduler.chain_room(r.request) for r in step.decoding}
        backups = self.planner.prepare(step, room)
        handovers = self.planner.number_handovers(step, backups)
        self._draft(step, self.planner.plan_draft(step, backups, handovers))
        return handovers

    def _one(self, step: Step, plan: StepPlan) -> tuple[Step | None, StepPlan]:
        leave = self.aheads.offer(step)
        outcomes = self._verify(plan, leave)
        found = None if leave is None else follow_on(leave, plan, outcomes, self.cache)
        if isinstance(found, Growing):  # nobody waits here
            found = None
        chains = {r.request.slot: len(r.request.chain) for r in step.decoding}
        slots = [r.request.slot for r in step.sampled]
        for i, emission in enumerate(self.scheduler.apply(step, outcomes)):
            chain = chains.get(slots[i], 0)
            if found is None:
                self.planner.settle(emission, chain)
            else:
                self.planner.settle_found(emission, chain, found[1][i].chain, found[1][i].entry)
            self.planner.conclude(emission)
            self.outputs[emission.request.rid] += emission.tokens
            if emission.finish:
                self.finish[emission.request.rid] = emission.finish
        if leave is None or found is None:
            return None, plan
        following = self.aheads.follow(step, leave)
        self._speculate(following)
        self.begun += 1
        return following, found[0]

    def _verify(self, plan: StepPlan, leave: Ahead | None) -> list[RowOutcome]:
        return self.verifier.run(plan).outcomes


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("mode", ["ar", "ssd"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_same_tokens(
    target: Path, drafts: dict[str, Path], mode: Any, name: str, adaptive: bool
) -> None:
    config = pipeline_settings(adaptive=adaptive)
    pipeline = AheadPipeline(mode, target, drafts["near"], config, blocks=400, haste=0.1)
    for rid, prompt in enumerate(prompts(2)):
        pipeline.add(rid, prompt, TOKENS, KEYS[name])
        pipeline.run()
    for rid, prompt in enumerate(prompts(2)):
        assert pipeline.outputs[rid] == expected(target, tuple(prompt), KEYS[name], TOKENS)
        assert pipeline.finish[rid] == "length"
    assert pipeline.begun > 5
    assert pipeline.target_blocks.num_free == 400
    if mode == "ssd":
        assert pipeline.draft_blocks.num_free == 400


@pytest.mark.parametrize("mode", ["ar", "ssd"])
def test_batches_and_penalties(target: Path, drafts: dict[str, Path], mode: Any) -> None:
    """What a row's processors have seen does not depend on who planned the step."""
    key = NoiseKey(seed=3, temperature=0.9, processors=Processors(4, repetition_penalty=1.4))
    outputs = []
    for kind in (LocalPipeline, AheadPipeline):
        pipeline = kind(mode, target, drafts["same"], pipeline_settings(), blocks=400)
        for rid, prompt in enumerate(prompts(3)):
            pipeline.add(rid, prompt[:4], TOKENS, key)
        outputs.append(pipeline.run())
    assert outputs[0] == outputs[1]
    assert isinstance(pipeline, AheadPipeline)
    assert pipeline.begun > 0
