"""Scheduler, planner, verifier and speculator in one thread, with real models.

The same objects the processes run, joined by function calls instead of channels, so that a test
decides how far the draft got when a verification ends.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ipc.messages import AddRequest, ChainReady, DraftPlan, Logprobs
from models.backends.base import Backend
from models.registry import load_model
from ssd_pipe.config import Mode, PipelineConfig, branch_budget
from ssd_pipe.drafting.speculator import Speculator
from ssd_pipe.engine.blocks import BlockManager, BlockTable
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.engine.speculation_cache import SpeculationCache, size_bytes
from ssd_pipe.params import NoiseKey
from ssd_pipe.sampling.grammar import Grammars
from ssd_pipe.verification.verifier import Verifier

if TYPE_CHECKING:
    from models.cuda.tree import TreeHooks
    from ssd_pipe.verification.leased import LeasedRounds


class LocalHandover:
    """Hand-over of distributions within one thread, in the shape of ipc.handover.Handover."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], np.ndarray | None] = {}

    def put(self, slot: int, number: int, rows: np.ndarray | None) -> None:
        self._rows[slot, number] = rows

    def take(self, slot: int, number: int, length: int) -> torch.Tensor | None:
        rows = self._rows.pop((slot, number))
        return None if rows is None else torch.from_numpy(rows[:length])


class LocalPipeline:
    """``haste`` in [0, 1]: chance that a verification ends before the draft's next pass."""

    def __init__(
        self,
        mode: Mode,
        target: Path,
        draft: Path,
        config: PipelineConfig,
        *,
        blocks: int = 64,
        haste: float = 0.0,
        seed: int = 0,
        backend: str | Backend = "reference",
        grammars: Grammars | None = None,
        graphs: bool = False,
        leased: LeasedRounds | None = None,
        publisher: TreeHooks | None = None,
        draft_dtype: str = "auto",
    ) -> None:
        spec, size = config.speculation, config.cache.block_size
        slots = config.scheduler.max_num_seqs
        self.random = random.Random(seed)
        self.haste = haste
        self.config = config
        self.handover = LocalHandover()
        model = load_model(target, backend=backend)
        kv = model.make_kv(blocks, size)
        steps, limit = None, config.scheduler.max_model_len + spec.k + 1
        if graphs:
            from ssd_pipe.verification.graphed import GraphedSteps

            widths = (1 if mode == "ar" else spec.k + 1,)
            steps = GraphedSteps(model, kv, slots, limit, widths, leased=leased)
        self.verifier = Verifier(model, kv, size, spec.rule, self.handover.take, grammars, steps)
        self.speculator: Speculator | None = None
        cache = None
        if mode != "ar":
            draft_model = load_model(draft, dtype=draft_dtype, backend=backend)
            branches = 64
            shape = (slots, branches, spec.k)
            cache = SpeculationCache(bytearray(size_bytes(*shape)), *shape, create=True)
            scratch = -(-slots * branches * spec.k // size)
            self.draft_blocks = BlockManager(blocks, size)
            draft_kv = draft_model.make_kv(blocks + scratch, size)
            draft_graphs = None
            if graphs:
                from ssd_pipe.drafting.graphed import GraphedDraft

                budget = branch_budget(spec)
                draft_graphs = GraphedDraft(
                    draft_model,
                    draft_kv,
                    spec,
                    blocks * size,
                    budget,
                    slots,
                    limit,
                    hooks=publisher,
                )
            self.speculator = Speculator(
                draft_model,
                draft_kv,
                self.draft_blocks,
                blocks * size,
                cache,
                spec,
                self.handover,
                grammars,
                draft_graphs,
            )
        self.cache = cache
        self.planner = RoundPlanner(mode, spec, cache)
        self.target_blocks = BlockManager(blocks, size)
        self.scheduler = Scheduler(
            blocks=self.target_blocks,
            max_num_seqs=slots,
            max_model_len=config.scheduler.max_model_len,
            max_batched_tokens=config.scheduler.max_batched_tokens,
            lookahead=0 if mode == "ar" else spec.k,
            max_waiting=1000,
        )
        self.outputs: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}
        self.logprobs: dict[int, list[Logprobs]] = {}

    def add(
        self,
        rid: int,
        tokens: list[int],
        max_tokens: int,
        key: NoiseKey | None = None,
        stop_ids: list[int] | None = None,
        logprobs: int = -1,
    ) -> None:
        key = key or NoiseKey()
        message = AddRequest(rid, tokens, max_tokens, key, stop_ids or [], 0, logprobs)
        self.outputs[rid], self.logprobs[rid] = [], []
        self.scheduler.add(Request.from_message(message, self.planner.hash0(key), BlockTable()))

    def abort(self, rid: int) -> None:
        request = self.scheduler.abort(rid)
        if request is not None:
            self.planner.forget(request)

    def lose_draft(self) -> None:
        """As procs.draft_port does when the draft dies or hangs."""
        self.planner.suspend(self.scheduler.running)

    def find_draft(self) -> None:
        """Another draft, or the same one, comes back and has forgotten everything."""
        assert self.speculator is not None
        self.speculator.apply(DraftPlan(round=0, rows=[], fresh=True))
        self.planner.drafting = True
        for request in self.scheduler.running:
            begin = self.planner.begin(request)
            self.speculator.apply(DraftPlan(round=0, rows=[], begin=[begin]))

    def step(self) -> None:
        """One round, exactly as procs.scheduler runs it."""
        step = self.scheduler.schedule()
        if step is None:
            return
        handovers: dict[int, int] = {}
        if self.speculator is not None and self.planner.drafting:
            room = {r.request.slot: self.scheduler.chain_room(r.request) for r in step.decoding}
            backups = self.planner.prepare(step, room)
            handovers = self.planner.number_handovers(step, backups)
            plan = self.planner.plan_draft(step, backups, handovers)
            by_slot = {r.request.slot: r.request for r in step.decoding}
            self.speculator.apply(plan)

            def answer(chain: ChainReady) -> None:
                self.planner.take_backup(by_slot[chain.slot], chain)

            for stage in self.speculator.round(plan, answer):
                if stage != "backup" and self.random.random() < self.haste:
                    break
            if self.random.random() > self.haste:
                while self.speculator.prefill():
                    pass
        verified = self.verifier.run(step.to_plan(handovers))
        chains = {r.request.slot: len(r.request.chain) for r in step.decoding}
        slots = [r.request.slot for r in step.sampled]
        for slot, emission in zip(
            slots, self.scheduler.apply(step, verified.outcomes), strict=True
        ):
            self.planner.settle(emission, chains.get(slot, 0))
            self.planner.conclude(emission)
            self.outputs[emission.request.rid] += emission.tokens
            self.logprobs[emission.request.rid] += emission.logprobs
            if emission.finish:
                self.finish[emission.request.rid] = emission.finish

    def run(self) -> dict[int, list[int]]:
        while self.scheduler.has_work:
            self.step()
        dropped = self.scheduler.take_dropped()
        if self.speculator is not None:
            self.speculator.apply(DraftPlan(round=0, rows=[], drop=dropped))
        return self.outputs
