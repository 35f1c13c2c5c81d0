"""``LocalPipeline`` with leased rounds: kernels, records and followers in one thread.

Under the interpreter the kernels wait for nobody, so the draft's part of a round runs between two
launches, and the glue pass that follows an outcome is launched when the outcome is there. On a GPU
the target's launches have a stream of their own, and whatever waits does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from ipc.messages.draft import ChainReady, DraftPlan
from ipc.round_records import Record, RoundRecords
from models.cuda.graphs import StepGraph
from models.cuda.rounds.follow import Follower
from models.cuda.rounds.layout import table_words
from models.cuda.rounds.publish import TreePublisher
from models.cuda.rounds.tables import RoundTables
from ssd_pipe.config import PipelineConfig, branch_budget
from ssd_pipe.drafting.gpu_forks import GlueAhead, GpuForks
from ssd_pipe.drafting.leased import RecordPlans
from ssd_pipe.engine.leases import Leased, Leases
from ssd_pipe.engine.step import Emission, Step
from ssd_pipe.verification.leased import LeasedRounds
from tests.rounds.local_pipeline import LocalPipeline


class LeasedPipeline(LocalPipeline):
    """SSD whose rounds are leased wherever they can be.

    ``recall``: chance after each leased round that the lease is ended early; ``skip``: that the
    draft is too late for it. Without ``follow`` no glue pass is queued before its outcome.
    ``leased`` counts the rounds that ran under a lease, ``verdicts`` what became of the glue passes
    that followed an outcome.
    """

    def __init__(
        self,
        target: Path,
        draft: Path,
        config: PipelineConfig,
        *,
        vocab_size: int,
        recall: float = 0.0,
        skip: float = 0.0,
        follow: bool = True,
        device: str = "cpu",
        **how: Any,
    ) -> None:
        on = torch.device(device)
        slots, k = config.scheduler.max_num_seqs, config.speculation.k
        entries = branch_budget(config.speculation)
        size = RoundRecords.size_bytes(slots, k)
        memory = torch.zeros(size, dtype=torch.uint8, pin_memory=on.type == "cuda")
        self.records = RoundRecords(memory.numpy(), slots, k)
        words = memory.view(torch.int64)
        mail = self.records.control.size
        ring = mail + self.records.mail.size
        tables = RoundTables(
            torch.zeros(slots * table_words(entries, k), dtype=torch.int64, device=on),
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
            leased=LeasedRounds(tables, on, False),
            publisher=TreePublisher(tables),
            follower=Follower(tables, on) if follow else None,
            **how,
        )
        assert self.speculator is not None
        self._side = torch.cuda.Stream() if on.type == "cuda" else None
        self.verdicts: Counter[str] = Counter()
        self._outcome_comes = self._watch_forks(self.speculator._gpu_forks)
        self.recall, self.skip = recall, skip
        self.leased = 0
        self._leases = Leases(self.scheduler, self.planner, config.speculation)
        self._plans = RecordPlans(self.records, config.speculation, self.speculator.tokens_of)
        self._read = 0

    def step(self) -> None:
        assert self.speculator is not None
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
        self.speculator.stand_down()
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
        assert self.speculator is not None
        plan = replace(step.to_plan(handovers), lease=leased.terms)
        self.speculator.stand_down()
        graph = self.verifier.begin_lease(plan)
        ended = self._aside = False
        for number in range(leased.terms.first, leased.terms.first + leased.terms.rounds):
            found = self._launched(graph, number, len(plan.rows))
            self._outcome_comes()
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
            if self.random.random() >= self.skip:
                self._draft(following, self._answer(number))
        self.speculator.stand_down()  # it would hold up what the target's side queues here
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        self.verifier.end_lease()

    def _launched(self, graph: StepGraph, number: int, rows: int) -> list[Record]:
        """Run round ``number``."""
        if self._side is None:
            graph.launch()
            found = self.records.round(number, rows)
            assert found is not None
            return found
        if not self._aside:  # the lease's first input is on its way on the draft's stream
            self._side.wait_stream(torch.cuda.current_stream())
            self._aside = True
        with torch.cuda.stream(self._side):
            graph.launch()
        deadline = time.monotonic() + 20
        while (found := self.records.round(number, rows)) is None:
            assert time.monotonic() < deadline
        return found

    def _watch_forks(self, forks: GpuForks | None) -> Callable[[], None]:
        """Counts verdicts; without a GPU, puts the glue pass that follows an outcome off until
        there is one. Returns what is to be called when there is."""
        if forks is None:
            return lambda: None
        go_ahead, resolve = forks.go_ahead, forks.resolve
        due: list[tuple[Any, ...]] = []

        def put_off(*given: Any) -> None:
            due.append(given)

        def come() -> None:
            while due:
                go_ahead(*due.pop())

        def resolved(number: int = 0) -> GlueAhead | None:
            ahead = resolve(number)
            if ahead is not None:
                self.verdicts[ahead.verdict.name] += 1
            return ahead

        forks.resolve = resolved  # type: ignore[method-assign]
        if self._side is None:
            forks.go_ahead = put_off  # type: ignore[method-assign]
        return come

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
