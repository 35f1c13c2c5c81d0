"""``LocalPipeline`` with leased rounds: kernels, records and followers in one thread.

The kernels wait for nobody here, so the draft's part of a round runs between two launches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from ipc.messages.draft import ChainReady, DraftPlan
from ipc.round_records import RoundRecords
from models.cuda.rounds.layout import table_words
from models.cuda.rounds.publish import TreePublisher
from models.cuda.rounds.tables import RoundTables
from ssd_pipe.config import PipelineConfig, branch_budget
from ssd_pipe.drafting.leased import RecordPlans
from ssd_pipe.engine.leases import Leased, Leases
from ssd_pipe.engine.step import Emission, Step
from ssd_pipe.verification.leased import LeasedRounds
from tests.rounds.local_pipeline import LocalPipeline


class LeasedPipeline(LocalPipeline):
    """SSD whose rounds are leased wherever they can be.

    ``recall``: chance after each leased round that the lease is ended early. ``leased`` counts the
    rounds that ran under one.
    """

    def __init__(
        self,
        target: Path,
        draft: Path,
        config: PipelineConfig,
        *,
        vocab_size: int,
        recall: float = 0.0,
        **how: Any,
    ) -> None:
        slots, k = config.scheduler.max_num_seqs, config.speculation.k
        entries = branch_budget(config.speculation)
        memory = np.zeros(RoundRecords.size_bytes(slots, k), np.uint8)
        self.records = RoundRecords(memory, slots, k)
        words = torch.from_numpy(self.records.words)
        mail = self.records.control.size
        ring = mail + self.records.mail.size
        tables = RoundTables(
            torch.zeros(slots * table_words(entries, k), dtype=torch.int64),
            entries,
            k,
            vocab_size,
            control=words[:mail],
            mail=words[mail:ring],
            records=words[ring:],
            max_rows=slots,
        )
        super().__init__(
            "ssd",
            target,
            draft,
            config,
            graphs=True,
            leased=LeasedRounds(tables, torch.device("cpu"), False),
            publisher=TreePublisher(tables),
            **how,
        )
        assert self.speculator is not None
        self.recall = recall
        self.leased = 0
        self._leases = Leases(self.scheduler, self.planner, config.speculation)
        self._plans = RecordPlans(self.records, config.speculation, self.speculator.tokens_of)
        self._read = 0

    def step(self) -> None:
        step = self.scheduler.schedule()
        if step is None:
            return
        leased = self._leases.grant(step)
        planner = self.planner
        room = {r.request.slot: self.scheduler.chain_room(r.request) for r in step.decoding}
        backups = planner.prepare(step, room)
        handovers = planner.number_handovers(step, backups)
        plan = planner.plan_draft(step, backups, handovers)
        plan = replace(plan, read=self._read)
        if leased is not None:
            plan = replace(plan, lease=leased.draft, number=leased.terms.first)
        while not self._plans.over and self._plans.number <= plan.read:
            self._apply(self._plans.take())
        self._plans.end()
        self._apply(plan)
        if leased is not None:
            self._plans.begin(plan)
        by_slot = {r.request.slot: r.request for r in step.decoding}
        self._draft(plan, lambda chain: planner.take_backup(by_slot[chain.slot], chain))
        if leased is not None:
            self._lease(leased, step, handovers)
            return
        verified = self.verifier.run(step.to_plan(handovers))
        chains = {r.request.slot: len(r.request.chain) for r in step.decoding}
        slots = [r.request.slot for r in step.sampled]
        emissions = self.scheduler.apply(step, verified.outcomes)
        for slot, emission in zip(slots, emissions, strict=True):
            planner.settle(emission, chains.get(slot, 0))
            planner.conclude(emission)
            self._emit(emission)

    def _apply(self, plan: DraftPlan | None) -> None:
        assert plan is not None
        assert self.speculator is not None
        self.speculator.apply(plan)

    def _draft(self, plan: DraftPlan, answer: Any) -> None:
        assert self.speculator is not None
        stages = self.speculator.round(plan, answer, lambda s: self.records.skip(s, plan.number))
        for stage in stages:
            if stage != "backup" and self.random.random() < self.haste:
                break
        if self.random.random() > self.haste:
            while self.speculator.prefill():
                pass

    def _lease(self, leased: Leased, step: Step, handovers: dict[int, int]) -> None:
        plan = replace(step.to_plan(handovers), lease=leased.terms)
        graph = self.verifier.begin_lease(plan)
        ended = False
        for number in range(leased.terms.first, leased.terms.first + leased.terms.rounds):
            graph.launch()
            found = self.records.round(number, len(plan.rows))
            assert found is not None
            self.leased += 1
            for emission in self._leases.follow(leased, found)[1]:
                self._emit(emission)
            self._read = number
            ended = all(record.finished for record in found) or self.random.random() < self.recall
            if ended:
                break
            following = self._plans.take()
            assert following is not None
            self._apply(following)
            self._draft(following, self._answer(number))
        self.verifier.end_lease()

    def _answer(self, number: int) -> Any:
        def answer(chain: ChainReady) -> None:
            self.records.answer(chain.slot, number, chain.tokens)

        return answer

    def _emit(self, emission: Emission) -> None:
        rid = emission.request.rid
        self.outputs[rid] += emission.tokens
        if emission.finish:
            self.finish[rid] = emission.finish

    def run(self) -> dict[int, list[int]]:
        while self.scheduler.has_work:
            self.step()
        assert self.speculator is not None
        while not self._plans.over and self._plans.number <= self._read:
            self._apply(self._plans.take())
        self.speculator.apply(DraftPlan(round=0, rows=[], drop=self.scheduler.take_dropped()))
        return self.outputs
