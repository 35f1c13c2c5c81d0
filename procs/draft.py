"""Draft worker: owns the draft model, its KV, and its part of the speculation cache.

Works on the newest plan only. When another arrives, the outcome of the running verification is
known, so what is left of the branches for other outcomes is dropped between two passes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ipc.channel import TypedReceiver, TypedSender
from ipc.doorbell import Doorbell
from ipc.handover import Handover
from ipc.messages.draft import ChainReady, DepthReady, DraftNotice, DraftPlan, DraftTimes
from ipc.segments import create_or_open_segment
from models.kv_cache import KVCache
from models.registry import load_model
from models.transformer import Transformer
from procs import channels
from procs.device_link import FACT, DraftLink
from procs.device_probe import agree, describe_device
from procs.placement import Threads, kv_blocks, place, spin_us
from procs.profiling import StepProfiler
from procs.runtime import Runtime
from ssd_pipe.config import PipelineConfig, load_format
from ssd_pipe.dimensions import Dimensions, dimensions
from ssd_pipe.drafting.leased import RecordPlans
from ssd_pipe.drafting.passes import chain_vocab
from ssd_pipe.drafting.speculator import Speculator
from ssd_pipe.engine.blocks import BlockManager
from ssd_pipe.engine.partition import Share
from ssd_pipe.engine.partitioned_cache import make_part, size_bytes
from ssd_pipe.errors import PeerLost
from ssd_pipe.hub import resolve
from ssd_pipe.sampling.grammar import Grammars

if TYPE_CHECKING:
    from ssd_pipe.drafting.graphed import GraphedDraft

POLL = 0.5  # seconds between looks at the stop flag
DECIDE_SECONDS = 120e-6  # what the scheduler may take to say whether it waits for another depth
PLAN_SECONDS = 1e-3  # what its next plan may take then


def run(runtime: Runtime) -> None:
    """Body of the process "draft", or "draft-<rank>" of several."""
    worker = _Worker(runtime, dimensions(runtime.config))
    with StepProfiler(runtime) as profiler:
        runtime.ready(worker.facts)
        worker.serve(profiler)


class _Worker:
    def __init__(self, runtime: Runtime, sizes: Dimensions) -> None:
        config = runtime.config
        self._runtime = runtime
        self.sizes = sizes
        device = place(config, "draft", runtime.rank)
        runtime.notes["device"] = describe_device(device)
        if runtime.rank == 0 and not runtime.returning:
            agree(runtime, device)
        self._threads = Threads(runtime, device)
        self._decide_seconds = DECIDE_SECONDS if device.type == "cuda" else 0.0
        self.facts = {"vocab_size": sizes.vocab_size}
        link = DraftLink(runtime, sizes, device) if config.mode == "ssd" else None
        self._waiting: DraftPlan | None = None
        self._leased: RecordPlans | None = None
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
            _graphs(config, model, kv, sizes, trunk_blocks * block_size, link),
            share,
        )
        if link is not None:
            self.facts[FACT] = int(self._records is not None)
            runtime.log.info(
                "leased rounds", possible=self._records is not None, reason=link.reason
            )
        if self._records is not None:
            self._leased = RecordPlans(
                self._records, config.speculation, self._speculator.tokens_of
            )
        self._plans = TypedReceiver.open(
            runtime,
            channels.draft_plans(runtime.rank),
            DraftPlan,
            capacity=sizes.plan_bytes,
            spin_us=spin_us(device),
        )
        self._notices = TypedSender.open(runtime, channels.draft_notices(runtime.rank), DraftNotice)
        self._begun = False
        runtime.log.info(
            "loaded",
            backend=model.backend.name,
            weight_bytes=model.weight_bytes,
            device=str(device),
            kv_blocks=trunk_blocks,
            threads=torch.get_num_threads(),
        )

    def serve(self, profiler: StepProfiler) -> None:
        plan: DraftPlan | None = None
        lagging = False
        while not self._runtime.stopping.is_set():
            self._runtime.alive()
            if plan is None:
                plan = self._next(0 if lagging else POLL)
            if plan is None:
                lagging = self._speculator.prefill()
                continue
            lagging = True
            self._take_up(plan)
            waiting = self._next(0)
            if waiting is None:
                with profiler.step(f"draft {plan.round}"):
                    waiting = self._round(plan)
            plan = waiting

    def _take_up(self, plan: DraftPlan) -> None:
        self._speculator.apply(plan)
        if plan.lease is not None and self._leased is not None:
            self._leased.begin(plan)

    def _next(self, timeout: float) -> DraftPlan | None:
        """The next plan, from the scheduler or, under a lease, from the records.

        The plan before it must have been taken up. Raises PeerLost if records are missing that
        the scheduler has seen.
        """
        plan, self._waiting = self._waiting, None
        if plan is not None:
            return plan
        leased = self._leased
        if leased is None or leased.over:
            return self._receive(timeout)
        end = time.monotonic() + timeout
        while True:
            plan = leased.take()
            if plan is None:
                plan = self._receive(0)
                if plan is not None:
                    self._read_rest(leased, plan.read)
            if plan is not None or time.monotonic() >= end or self._runtime.stopping.is_set():
                return plan

    def _read_rest(self, leased: RecordPlans, last: int) -> None:
        """The lease has ended: take in the records up to round ``last``."""
        while leased.number <= last:
            plan = leased.take()
            if plan is None:
                raise PeerLost(f"the records of round {leased.number} are missing")
            self._speculator.apply(plan)
        leased.end()

    def _interrupted(self) -> bool:
        """Whether another plan has come."""
        self._waiting = self._next(0)
        return self._waiting is not None

    def _round(self, plan: DraftPlan) -> DraftPlan | None:
        """Run a round until it ends or the next plan comes; returns that plan."""
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
                    following = self._last_call()
                    if following is not None:
                        break
            else:
                stamps[stage] = now
            # A backup chain has someone waiting for it; anything else yields to the next plan.
            if stage != "backup":
                following = self._next(0)
                if following is not None:
                    break
        following = following or self._waiting
        self._waiting = None
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
        self._notices.send(times)
        if not plan.rows:
            return following
        self._runtime.log.info(
            "draft",
            round=plan.round,
            start=started,
            backup=times.backup_ns,
            glue=times.glue_ns,
            depths=depths,
            end=times.finished_ns,
            rids=self._speculator.request_ids(plan),
            branches=times.branches,
            cut=following is not None,
        )
        return following

    def _last_call(self) -> DraftPlan | None:
        """The next plan, if whoever waited for this depth wants no more of them.

        A pass that has begun on a GPU cannot be taken back, and the next round waits for its end.
        """
        end = time.monotonic() + self._decide_seconds
        while time.monotonic() < end:
            if not self._cache.reader_waits:
                return self._receive(PLAN_SECONDS)
        return None

    def _receive(self, timeout: float) -> DraftPlan | None:
        """The next plan. What comes before the first fresh one was meant for a predecessor."""
        plan = self._plans.recv(timeout)
        self._begun = self._begun or (plan is not None and plan.fresh)
        return plan if self._begun else None

    def _stages(self, plan: DraftPlan) -> Iterator[str]:
        records = self._records
        if not plan.number or records is None:
            return self._speculator.round(plan, self._notices.send)

        def answer(chain: ChainReady) -> None:
            if plan.lease is None:  # made from records: it is the GPU that waits
                records.answer(chain.slot, plan.number - 1, chain.tokens)
            else:
                self._notices.send(chain)

        def skip(slot: int) -> None:
            records.skip(slot, plan.number)

        return self._speculator.round(plan, answer, skip, self._interrupted)


def _graphs(
    config: PipelineConfig,
    model: Transformer,
    kv: KVCache,
    sizes: Dimensions,
    scratch_start: int,
    link: DraftLink | None,
) -> GraphedDraft | None:
    """CUDA graphs for the draft's passes, made, where it can have them."""
    if model.backend.name != "cuda" or config.draft.enforce_eager:
        return None
    from ssd_pipe.drafting.graphed import GraphedDraft

    hooks = None
    if link is not None and link.tables is not None:
        from models.cuda.rounds import TreePublisher

        hooks = TreePublisher(link.tables)
    graphs = GraphedDraft(
        model,
        kv,
        config.speculation,
        scratch_start,
        sizes.worker_branches,
        sizes.slots,
        sizes.max_model_len + sizes.k + 1,
        chain_vocab(config.speculation, model),
        hooks=hooks,
    )
    graphs.warm_up(config.mode == "ssd")
    return graphs
