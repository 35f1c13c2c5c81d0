"""Scheduler process: owns the requests, the target's blocks and the round loop.

One iteration is one round: take new requests, plan a step, tell target and draft, wait for the
outcomes, look them up in the speculation cache, and only then, with the next step under way, pass
the tokens on. It is also the hub of the group: every other process answers to it.

The ports are opened before the group is waited for, since its other processes look for them while
they load; what depends on the group (KV blocks, the speculation cache) is made after it.
"""

from __future__ import annotations

import gc
import time

from ipc.messages.draft import DraftPlan
from ipc.messages.target import RowOutcome, StepResult
from ipc.round_records import RoundRecords
from procs import channels
from procs.draft_port import DraftPort
from procs.frontend_port import FrontendPort
from procs.hub import Hub
from procs.lease_follower import LeaseFollower, can_lease
from procs.reporter import Reporter
from procs.request_desk import RequestDesk
from procs.runtime import Runtime
from procs.target_port import TargetPort
from procs.waiting import Waiter
from ssd_pipe.config import PipelineConfig
from ssd_pipe.dimensions import Dimensions, dimensions
from ssd_pipe.engine.blocks import BlockManager
from ssd_pipe.engine.leases import Leased, Leases
from ssd_pipe.engine.round_times import RoundTimes
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.engine.step import Emission, Step
from ssd_pipe.engine.synthetic import SyntheticOutcomes
from ssd_pipe.errors import PeerLost
from ssd_pipe.threads import on_cpu

IDLE_POLL = 0.2  # seconds


def run(runtime: Runtime) -> None:
    """Body of the process "scheduler"."""
    config = runtime.config
    sizes = dimensions(config)
    with Hub(runtime) as hub:
        waiter, times = Waiter(runtime, hub), RoundTimes()
        frontend = FrontendPort(runtime, waiter)
        target = TargetPort(runtime, sizes, waiter)
        draft = DraftPort(runtime, sizes, waiter, times) if config.speculative else None
        facts = hub.wait_ready(config.run.ready_timeout)
        blocks = min(f["num_blocks"] for f in facts.values() if "num_blocks" in f)
        if draft is not None:
            counts = [f["draft_blocks"] for f in facts.values() if "draft_blocks" in f]
            draft.begin(min(counts, default=0))
        cache = draft.map_cache() if draft is not None and config.mode == "ssd" else None
        scheduler = _scheduler(config, sizes, blocks)
        planner = RoundPlanner(config.mode, config.speculation, cache)
        reporter = Reporter(frontend, planner, runtime.log)
        desk = RequestDesk(runtime.log, hub, frontend, scheduler, planner, times, draft, reporter)
        loop = _Loop(runtime, hub, desk, target, draft, scheduler, planner, times, reporter)
        if draft is not None and can_lease(facts):
            records = RoundRecords.open(
                runtime.rundir.segment(channels.RECORDS), sizes.slots, sizes.k
            )
            loop.lease(records, waiter)
        own = {"max_model_len": sizes.max_model_len, "vocab_size": sizes.vocab_size}
        hub.announce(own)
        runtime.ready(own)
        try:
            loop.serve()
        except PeerLost as error:
            desk.fail_all(str(error))
            raise


def _scheduler(config: PipelineConfig, sizes: Dimensions, blocks: int) -> Scheduler:
    return Scheduler(
        blocks=BlockManager(blocks, config.cache.block_size, config.cache.prefix_caching),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=sizes.max_model_len,
        max_batched_tokens=config.scheduler.max_batched_tokens,
        lookahead=config.speculation.k if config.speculative else 0,
        max_waiting=config.scheduler.max_waiting,
        long_prefill=_long_prefill(config),
    )


def _long_prefill(config: PipelineConfig) -> int:
    given = config.scheduler.long_prefill_token_threshold
    return given or (config.scheduler.max_batched_tokens // 4 if on_cpu(config) else 0)


class _Loop:
    def __init__(
        self,
        runtime: Runtime,
        hub: Hub,
        desk: RequestDesk,
        target: TargetPort,
        draft: DraftPort | None,
        scheduler: Scheduler,
        planner: RoundPlanner,
        times: RoundTimes,
        reporter: Reporter,
    ) -> None:
        self._runtime = runtime
        self._hub = hub
        self._desk = desk
        self._target = target
        self._draft = draft
        self._scheduler = scheduler
        self._planner = planner
        self._times = times
        self._reporter = reporter
        self._synthetic = SyntheticOutcomes.of(runtime.config.speculation)
        if self._synthetic is not None:
            label = self._synthetic.label
            runtime.log.warning(f"synthetic acceptance ({label}): the text means nothing")
        self._leases: LeaseFollower | None = None

    def lease(self, records: RoundRecords, waiter: Waiter) -> None:
        """Let rounds run on the GPUs alone where they can."""
        spec = self._runtime.config.speculation
        if self._draft is not None:
            self._leases = LeaseFollower(
                Leases(self._scheduler, self._planner, spec, self._synthetic),
                records,
                self._target,
                self._desk.has_mail,
                waiter,
                self._times,
                self._leased_round,
            )

    # ------------------------------------------------------------ loop

    def serve(self) -> None:
        """Until the stop flag is up. Raises PeerLost when a process of the group is gone."""
        # Collections come when this process has nothing urgent to do (see Reporter.tell).
        gc.disable()
        if self._draft is not None:
            self._draft.greet(self._planner)
        while not self._runtime.stopping.is_set():
            self._runtime.alive()
            self._hub.raise_lost()
            if not self._scheduler.has_work:
                self._times.idle()
                self._look_for_draft()
                self._flush_drops()
                self._desk.wait(IDLE_POLL)
            self._desk.attend()
            if self._scheduler.has_work:
                self._round()

    def _round(self) -> None:
        self._look_for_draft()  # before slots change hands, see DraftPort.look
        scheduler = self._scheduler
        scheduler.lookahead = self._planner.decide(scheduler.load).k
        step = scheduler.schedule()
        if step is None:
            return
        now = time.monotonic_ns()
        for request in step.begun:
            request.scheduled_ns = request.scheduled_ns or now
        result = self._run(step, self._grant(step))
        if result is None:
            return  # told to stop, or a lease is over
        chains = {row.request.slot: len(row.request.chain) for row in step.decoding}
        fed = sum(row.count for row in step.rows) + sum(chains.values())
        whole = self._times.step(result, fed)
        slots = [row.request.slot for row in step.sampled]
        emissions = self._scheduler.apply(step, self._outcomes(step, result, chains))
        verified = [chains.get(slot, 0) for slot in slots]
        for emission, chain in zip(emissions, verified, strict=True):
            self._planner.settle(emission, chain)
        queried = time.monotonic_ns()
        waited = 0
        if self._draft is not None and self._planner.drafting:
            live = [emission.request for emission in emissions if not emission.finish]
            for request in live:
                waited = self._draft.depth(self._planner, request, len(live)) or waited
        for emission in emissions:
            self._planner.conclude(emission)
        self._reporter.note(step, result, verified, emissions, (queried, waited), whole)
        if not self._scheduler.has_work:
            self._reporter.tell()

    def _leased_round(
        self,
        step: Step,
        result: StepResult,
        verified: list[int],
        emissions: list[Emission],
        cache_ns: tuple[int, int],
        seconds: float,
    ) -> None:
        self._reporter.sent_ns = result.started_ns
        self._reporter.note(step, result, verified, emissions, cache_ns, seconds)
        self._reporter.tell()
        if self._draft is not None:
            self._draft.drain(self._planner)

    def _run(self, step: Step, leased: Leased | None) -> StepResult | None:
        """Have a step done by target and draft; returns its result, None when told to stop.

        A lease is followed to its end; None then too.
        """
        planner, draft = self._planner, self._draft
        if draft is None or not planner.drafting:
            self._send_step(step, {})
        else:
            decoding = {row.request.slot: row.request for row in step.decoding}
            room = {slot: self._scheduler.chain_room(r) for slot, r in decoding.items()}
            backups = planner.prepare(step, room)
            if not planner.tells(decoding):
                leased = None
            handovers = planner.number_handovers(step, backups)
            if backups:
                draft.send(planner.plan_draft(step, backups, handovers), leased)
                if not draft.backups(planner, decoding, backups, self._reporter.tell):
                    return None
                if draft.trouble:
                    planner.suspend(self._scheduler.running)
                    handovers, leased = {}, None
                self._send_step(step, handovers, leased)
                draft.send_rest(decoding)
            else:
                self._send_step(step, handovers, leased)
                draft.send(planner.plan_draft(step, backups, handovers), leased)
        self._reporter.tell()
        if draft is not None and leased is not None and self._leases is not None:
            draft.read, late = self._leases.follow(leased)
            if late:
                draft.missed("branches")
            self._desk.receive()
            return None
        if draft is not None and planner.drafting:
            draft.drain(planner)
        self._desk.receive()
        return self._target.result(step.number)

    def _grant(self, step: Step) -> Leased | None:
        """A lease, if it may be. Another draft than the first may not reach the GPU's cache."""
        draft = self._draft
        planner = self._planner
        if self._leases is None or draft is None or not planner.drafting:
            return None
        if draft.losses and not can_lease(self._hub.facts()):
            return None
        if planner.effort != planner.pace.efforts.full:
            return None  # the GPU follows rounds of the configured kind only
        return self._leases.grant(step)

    def _send_step(
        self, step: Step, handovers: dict[int, int], leased: Leased | None = None
    ) -> None:
        plan = step.to_plan(handovers, self._planner.effort.alone)
        self._reporter.sent_ns = time.monotonic_ns()
        self._target.send(plan, leased)

    def _look_for_draft(self) -> None:
        if self._draft is not None:
            self._draft.look(self._planner, self._scheduler.running)

    def _outcomes(self, step: Step, result: StepResult, chains: dict[int, int]) -> list[RowOutcome]:
        """The step's outcomes, or what replays others in their place."""
        if self._synthetic is None:
            return result.outcomes
        replayed = []
        for row, outcome in zip(step.sampled, result.outcomes, strict=True):
            chain = chains.get(row.request.slot, 0)
            cached = self._planner.cached.recovery_tokens(row.request)
            replayed.append(self._synthetic.replace(outcome, chain, row.request.rid, cached))
        return replayed

    def _flush_drops(self) -> None:
        """Let the draft free its blocks although no step is coming."""
        dropped = self._scheduler.take_dropped()
        if dropped and self._draft is not None and self._planner.drafting:
            self._draft.send(DraftPlan(round=0, rows=[], drop=dropped))
