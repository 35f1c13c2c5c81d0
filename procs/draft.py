"""Draft worker: owns the draft model, its KV, and its part of the speculation cache.

Works on the newest plan only. When another arrives, the outcome of the running verification is
known, so what is left of the branches for other outcomes is dropped, but for passes that a GPU has
queued.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ipc.channel import TypedReceiver, TypedSender
from ipc.doorbell import Doorbell
from ipc.handover import Handover
from ipc.messages.draft import ChainReady, DepthReady, DraftNotice, DraftPlan, DraftTimes
from ipc.segments import create_or_open_segment
from models.registry import load_model
from procs import channels
from procs.device_link import FACT, DraftLink
from procs.device_probe import agree, describe_device
from procs.draft_graphs import make_graphs
from procs.placement import Threads, kv_blocks, place, spin_us
from procs.plan_inbox import PlanInbox
from procs.profiling import StepProfiler
from procs.runtime import Runtime
from ssd_pipe import slow_kernels
from ssd_pipe.config import load_format
from ssd_pipe.dimensions import Dimensions, dimensions
from ssd_pipe.drafting.leased import RecordPlans
from ssd_pipe.drafting.speculator import Speculator
from ssd_pipe.engine.blocks import BlockManager
from ssd_pipe.engine.partition import Share
from ssd_pipe.engine.partitioned_cache import make_part, size_bytes
from ssd_pipe.hub import resolve
from ssd_pipe.sampling.grammar import Grammars

POLL = 0.5  # seconds between looks at the stop flag
DECIDE_SECONDS = 120e-6  # what the scheduler may take to say whether it waits for another depth


def run(runtime: Runtime) -> None:
    """Body of the process "draft", or "draft-<rank>" of several."""
    worker = _Worker(runtime, dimensions(runtime.config))
    with StepProfiler(runtime) as profiler:
        runtime.ready(worker.facts)
        try:
            worker.serve(profiler)
        finally:
            worker.close()


@dataclass(frozen=True, slots=True)
class _Round:
    """What is to be told of a round: when its depths were there (ns), and whether it was cut."""

    times: DraftTimes
    rids: list[int]
    depths: list[int]
    cut: bool


class _Worker:
    def __init__(self, runtime: Runtime, sizes: Dimensions) -> None:
        config = runtime.config
        self._runtime = runtime
        self._untold: _Round | None = None
        self.sizes = sizes
        device = place(config, "draft", runtime.rank)
        runtime.notes["device"] = describe_device(device)
        if runtime.rank == 0 and not runtime.returning:
            agree(runtime, device)
        self._threads = Threads(runtime, device)
        self._on_gpu = device.type == "cuda"
        self.facts = {"vocab_size": sizes.vocab_size}
        link = DraftLink(runtime, sizes, device) if config.mode == "ssd" else None
        self._link = link
        self._records = link.records if link is not None else None
        model = load_model(
            resolve(config.draft.model),
            dtype=config.draft.dtype,
            device=str(device),
            backend=config.draft.backend,
            attention=config.draft.attention,
            exact=False,
            load_format=load_format(config.draft),
            seed=config.draft.seed,
            max_positions=sizes.max_model_len,
        )
        block_size = config.cache.block_size
        trunk_blocks = kv_blocks(model, config, sizes, "draft", runtime.rank)
        kv = model.make_kv(trunk_blocks + sizes.scratch_blocks, block_size)
        self.facts["draft_blocks"] = trunk_blocks
        self._blocks = BlockManager(trunk_blocks, block_size, config.cache.prefix_caching)
        share = Share(runtime.rank, config.draft_workers)
        shape = (sizes.slots, sizes.branches, sizes.k)
        # Whichever worker comes first makes the segment; each clears its own part.
        memory = create_or_open_segment(
            runtime.rundir.segment(channels.SPECULATION_CACHE), size_bytes(*shape, share.workers)
        )
        self._cache = make_part(memory, *shape, share, sizes.vocab_size)
        handover = None
        if config.speculation.rule == "rejection":
            handover = Handover.create(
                runtime.rundir.segment(channels.handover(share.worker)),
                Doorbell(runtime.rundir.bell(channels.handover(share.worker))),
                sizes.slots,
                sizes.k,
                sizes.vocab_size,
            )
        self._speculator = Speculator(
            model,
            kv,
            self._blocks,
            trunk_blocks * block_size,
            self._cache,
            config.speculation,
            handover,
            Grammars.of_model(resolve(config.target.model), sizes.vocab_size),
            make_graphs(config, model, kv, sizes, trunk_blocks * block_size, link),
            share,
        )
        if link is not None:
            self.facts[FACT] = int(self._records is not None)
            runtime.log.info(
                "leased rounds", possible=self._records is not None, reason=link.reason
            )
        spares = self._on_gpu and not self._speculator.runs_ahead
        self._decide_seconds = DECIDE_SECONDS if spares else 0.0
        leased = None
        if self._records is not None:
            leased = RecordPlans(self._records, config.speculation, self._speculator.tokens_of)
        plans = TypedReceiver.open(
            runtime,
            channels.draft_plans(runtime.rank),
            DraftPlan,
            capacity=sizes.plan_bytes,
            spin_us=spin_us(device),
        )
        speculator = self._speculator
        self._inbox = PlanInbox(plans, runtime.stopping, speculator.apply, leased, speculator.look)
        self._notices = TypedSender.open(runtime, channels.draft_notices(runtime.rank), DraftNotice)
        slow_kernels.note(runtime.notes, runtime.log, model.backend.fallback)
        runtime.log.info(
            "loaded",
            backend=model.backend.name,
            weight_bytes=model.weight_bytes,
            device=str(device),
            kv_blocks=trunk_blocks,
            threads=torch.get_num_threads(),
        )

    def close(self) -> None:
        """Leave nothing on the GPU that waits, and give the records back."""
        self._speculator.close()
        if self._link is not None:
            self._link.close()

    def serve(self, profiler: StepProfiler) -> None:
        plan: DraftPlan | None = None
        lagging = False
        while not self._runtime.stopping.is_set():
            self._runtime.alive()
            if plan is None:
                self._tell()
                plan = self._inbox.next(0 if lagging else POLL)
            if plan is None:
                if not lagging:  # nothing has come for a while, and a GPU that waits is busy
                    self._speculator.stand_down()
                lagging = self._speculator.prefill()
                continue
            lagging = True
            self._inbox.take_up(plan)
            waiting = self._inbox.next(0)
            if waiting is None:
                with profiler.step(f"draft {plan.round}"):
                    waiting = self._round(plan)
            plan = waiting

    def _round(self, plan: DraftPlan) -> DraftPlan | None:
        """Run a round until it ends or the next plan comes; returns that plan.

        On a GPU the others hear of it while the next round's glue pass runs: the target waits for
        that round's tokens.
        """
        started = time.monotonic_ns()
        stamps = {"backup": started, "glue": started}
        depths: list[int] = []
        following: DraftPlan | None = None
        # Without forks the target waits for all there is to do, and lends its cores.
        forks = any(row.fork for row in plan.rows)
        self._threads.use(not forks and any(row.backup for row in plan.rows))
        for stage in self._stages(plan):
            now = time.monotonic_ns()
            if stage == "step":
                depths.append(now)
                if self._cache.reader_waits:
                    self._notices.send(DepthReady(plan.round, len(depths)))
                    following = self._inbox.last_call(
                        lambda: self._cache.reader_waits, self._decide_seconds
                    )
                    if following is not None:
                        break
            else:
                stamps[stage] = now
            # A backup chain has someone waiting for it; anything else yields to the next plan.
            if stage != "backup":
                following = self._inbox.next(0)
                if following is not None:
                    break
        # The round may have ended because a plan came, which is kept there.
        following = following or self._inbox.take_held()
        times = DraftTimes(
            round=plan.round,
            started_ns=started,
            backup_ns=stamps["backup"],
            glue_ns=max(stamps.values()),
            tree_ns=max([*stamps.values(), *depths]),
            finished_ns=time.monotonic_ns(),
            steps=len(depths),
            branches=self._speculator.branches,
            free_blocks=self._blocks.num_free,
        )
        self._tell()
        self._untold = _Round(
            times, self._speculator.request_ids(plan), depths, following is not None
        )
        if following is None or not self._on_gpu:
            self._tell()
        return following

    def _tell(self) -> None:
        """The scheduler and the log of the last round, unless that was done."""
        told, self._untold = self._untold, None
        if told is None:
            return
        times = told.times
        self._notices.send(times)
        if not told.rids:
            return
        self._runtime.log.info(
            "draft",
            round=times.round,
            start=times.started_ns,
            backup=times.backup_ns,
            glue=times.glue_ns,
            depths=told.depths,
            end=times.finished_ns,
            rids=told.rids,
            branches=times.branches,
            cut=told.cut,
        )

    def _stages(self, plan: DraftPlan) -> Iterator[str]:
        records = self._records
        if not plan.number or records is None:
            return self._speculator.round(
                plan,
                self._notices.send,
                interrupted=self._inbox.interrupted,
                meanwhile=self._tell,
            )

        def answer(chain: ChainReady) -> None:
            if plan.record:  # it is the GPU that waits
                records.answer(chain.slot, plan.record, chain.tokens)
            else:
                self._notices.send(chain)

        def skip(slot: int) -> None:
            records.skip(slot, plan.number)

        return self._speculator.round(plan, answer, skip, self._inbox.interrupted, self._tell)
