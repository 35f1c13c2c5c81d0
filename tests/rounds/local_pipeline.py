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

from ipc.messages.draft import ChainReady, DraftPlan
from ipc.messages.requests import AddRequest
from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Logprobs
from models.backends.base import Backend
from models.registry import load_model
from models.transformer import Transformer
from ssd_pipe.config import Mode, PipelineConfig, branch_budget
from ssd_pipe.drafting.speculator import Speculator
from ssd_pipe.engine.blocks import BlockManager, BlockTable
from ssd_pipe.engine.draft_plans import draft_start
from ssd_pipe.engine.effort import Effort
from ssd_pipe.engine.partition import Share, part_entries, with_backups
from ssd_pipe.engine.partitioned_cache import PartitionedCache, make_part, size_bytes
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.engine.speculation_cache import SpeculationCache
from ssd_pipe.engine.step import Step
from ssd_pipe.sampling.grammar import Grammars
from ssd_pipe.verification.verifier import Verifier

if TYPE_CHECKING:
    from models.cuda.rounds.follow import Follower
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
    """``haste`` in [0, 1]: chance that a verification ends before a draft worker's next pass.

    Draft worker ``late`` never gets beyond its glue pass.

    There are as many draft workers as ``config`` says, each with a model, blocks and trunks of its
    own; ``speculator`` and ``draft_blocks`` are the first one's. With a ``draft_backend`` of their
    own they use no ``graphs``.
    """

    def __init__(
        self,
        mode: Mode,
        target: Path,
        draft: Path,
        config: PipelineConfig,
        *,
        blocks: int = 64,
        haste: float = 0.0,
        late: int = -1,
        seed: int = 0,
        backend: str | Backend = "reference",
        grammars: Grammars | None = None,
        graphs: bool = False,
        ahead: bool = False,
        leased: LeasedRounds | None = None,
        publisher: TreeHooks | None = None,
        follower: Follower | None = None,
        draft_dtype: str = "auto",
        draft_backend: str | Backend = "",
    ) -> None:
        spec, size = config.speculation, config.cache.block_size
        slots = config.scheduler.max_num_seqs
        self.random = random.Random(seed)
        self.haste, self.late = haste, late
        self.config = config
        self.handover = LocalHandover()
        model = load_model(target, backend=backend)
        kv = model.make_kv(blocks, size)
        steps, limit = None, config.scheduler.max_model_len + spec.k + 1
        if graphs:
            from ssd_pipe.verification.graphed import GraphedSteps

            widths = (1 if mode == "ar" else spec.k + 1,)
            steps = GraphedSteps(model, kv, slots, limit, widths, leased=leased, ahead=ahead)
        self.verifier = Verifier(model, kv, size, spec.rule, self.handover.take, grammars, steps)
        self.speculator: Speculator | None = None
        self.speculators: list[Speculator] = []
        self.all_draft_blocks: list[BlockManager] = []
        cache = None
        if mode != "ar":
            workers = config.draft.workers if mode == "ssd" else 1
            shape = (slots, branch_budget(spec), spec.k)
            memory = bytearray(size_bytes(*shape, workers))
            for worker in range(workers):
                share = Share(worker, workers)
                part = make_part(memory, *shape, share)
                apart = draft_backend or backend
                draft_model = load_model(draft, dtype=draft_dtype, backend=apart)
                made = graphs and not draft_backend
                self._add_draft(
                    draft_model, part, share, blocks, made, grammars, publisher, follower
                )
            cache = PartitionedCache(memory, *shape, workers)
            self.speculator, self.draft_blocks = self.speculators[0], self.all_draft_blocks[0]
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
        self.efforts: list[Effort] = []  # one of them, at random, each round
        self.outputs: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}
        self.logprobs: dict[int, list[Logprobs]] = {}

    def _add_draft(
        self,
        model: Transformer,
        cache: SpeculationCache,
        share: Share,
        blocks: int,
        graphs: bool,
        grammars: Grammars | None,
        publisher: TreeHooks | None,
        follower: Follower | None,
    ) -> None:
        config, spec, size = self.config, self.config.speculation, self.config.cache.block_size
        slots, limit = config.scheduler.max_num_seqs, config.scheduler.max_model_len + spec.k + 1
        budget = part_entries(branch_budget(spec), share.workers)
        kv = model.make_kv(blocks + -(-slots * budget * spec.k // size), size)
        made = None
        if graphs:
            from ssd_pipe.drafting.graphed import GraphedDraft

            made = GraphedDraft(
                model,
                kv,
                spec,
                blocks * size,
                budget,
                slots,
                limit,
                hooks=publisher,
                follower=follower,
                workers=share.workers,
            )
        manager = BlockManager(blocks, size)
        self.all_draft_blocks.append(manager)
        self.speculators.append(
            Speculator(
                model, kv, manager, blocks * size, cache, spec, self.handover, grammars, made, share
            )
        )

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
        self.planner.drafting = True
        self.planner.effort = self.planner.pace.efforts.full  # nobody decides here round by round
        begin = [draft_start(request) for request in self.scheduler.running]
        for speculator in self.speculators:
            speculator.apply(DraftPlan(round=0, rows=[], fresh=True))
            speculator.apply(DraftPlan(round=0, rows=[], begin=begin))

    def step(self) -> None:
        """One round, exactly as procs.scheduler runs it, but for who decides on the effort."""
        if self.efforts:
            self.planner.effort = self.random.choice(self.efforts)
            self.scheduler.lookahead = self.planner.effort.k
        step = self.scheduler.schedule()
        if step is None:
            return
        handovers: dict[int, int] = {}
        if self.speculators and self.planner.drafting:
            room = {r.request.slot: self.scheduler.chain_room(r.request) for r in step.decoding}
            backups = self.planner.prepare(step, room)
            handovers = self.planner.number_handovers(step, backups)
            plan = self.planner.plan_draft(step, backups, handovers)
            self._draft(step, plan)
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

    def _draft(self, step: Step, plan: DraftPlan) -> None:
        """Every worker's part of a round; the first one makes the backups."""
        by_slot = {r.request.slot: r.request for r in step.decoding}

        def answer(chain: ChainReady) -> None:
            self.planner.take_backup(by_slot[chain.slot], chain)

        for worker, speculator in enumerate(self.speculators):
            if worker == 1:
                plan = with_backups(plan, {slot: r.chain for slot, r in by_slot.items()})
            haste = 1.0 if worker == self.late else self.haste
            speculator.apply(plan)
            for stage in speculator.round(plan, answer):
                if stage != "backup" and self.random.random() < haste:
                    break
            if self.random.random() > haste:
                while speculator.prefill():
                    pass

    def run(self) -> dict[int, list[int]]:
        while self.scheduler.has_work:
            self.step()
        dropped = self.scheduler.take_dropped()
        for speculator in self.speculators:
            speculator.apply(DraftPlan(round=0, rows=[], drop=dropped))
        return self.outputs
