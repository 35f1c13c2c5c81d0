"""Scheduler process: owns the requests, the target's blocks and the round loop.

One iteration is one round: take new requests, plan a step, tell target and draft, wait for the
outcomes, look them up in the speculation cache, and only then, with the next step under way, pass
the tokens on. Where the target may go ahead, it begins that step by itself (``going_ahead``). It is
also the hub of the group: every other process answers to it.

The ports are opened before the group is waited for, since its other processes look for them while
they load; what depends on the group (KV blocks, the speculation cache) is made after it.
"""

from __future__ import annotations

import gc
import time

from ipc.messages.draft import DraftPlan
from ipc.messages.target import StepResult
from ipc.round_records import RoundRecords
from procs import channels
from procs.admission import make_scheduler
from procs.draft_port import DraftPort
from procs.frontend_port import FrontendPort
from procs.going_ahead import GoingAhead, going_ahead
from procs.hub import Hub
from procs.lease_follower import LeaseFollower, can_lease
from procs.reporter import Reporter
from procs.request_desk import RequestDesk
from procs.runtime import Runtime
from procs.target_port import TargetPort
from procs.waiting import Waiter
from ssd_pipe.dimensions import dimensions
from ssd_pipe.engine.leases import Leased, Leases
from ssd_pipe.engine.round_times import RoundTimes
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.engine.step import Emission, Step
from ssd_pipe.engine.synthetic import SyntheticOutcomes
from ssd_pipe.errors import PeerLost

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
        scheduler = make_scheduler(config, sizes, blocks)
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
        self._ahead = GoingAhead(
            going_ahead(runtime.config, scheduler, planner), target, desk, draft
        )

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
                self._planner.idle()
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
        while result is not None:  # else told to stop, or a lease is over
            following = self._commit(step, result)
            if following is None:
                return
            step = following
            result = self._join(step)

    def _commit(self, step: Step, result: StepResult) -> Step | None:
        """Take what a step gave; returns the next one if the target has begun it by itself."""
        chains = {row.request.slot: len(row.request.chain) for row in step.decoding}
        fed = sum(row.count for row in step.rows) + sum(chains.values())
        whole = self._times.step(result, fed)
        slots = [row.request.slot for row in step.sampled]
        outcomes = result.outcomes
        if self._synthetic is not None:
            cached = self._planner.cached.recovery_tokens
            outcomes = self._synthetic.replace_all(step, outcomes, cached)
        emissions = self._scheduler.apply(step, outcomes)
        verified = [chains.get(slot, 0) for slot in slots]
        looked_up = self._settle(emissions, verified, result)
        for emission in emissions:
            self._planner.conclude(emission)
        self._reporter.note(step, result, verified, emissions, looked_up, whole)
        if not self._scheduler.has_work:
            self._reporter.tell()
        following = self._ahead.follow(step, result)
        if following is not None:
            self._reporter.sent_ns = result.waited_ns or result.looked_up_ns
        return following

    def _settle(
        self, emissions: list[Emission], verified: list[int], result: StepResult
    ) -> tuple[int, int]:
        """Look outcomes up, if the target has not, and wait for what is worth it; returns when
        they had been looked up and when the wait was over, 0 without one."""
        waited = result.waited_ns
        self._times.target_waited(result)
        if result.found:
            for emission, chain, own in zip(emissions, verified, result.found, strict=True):
                self._planner.settle_found(emission, chain, own.chain, own.entry)
            return result.looked_up_ns, waited
        for emission, chain in zip(emissions, verified, strict=True):
            self._planner.settle(emission, chain)
        queried = result.looked_up_ns or time.monotonic_ns()
        if self._draft is not None and self._planner.drafting:
            live = [emission.request for emission in emissions if not emission.finish]
            for request in live:
                waited = self._draft.depth(self._planner, request, len(live)) or waited
        return queried, waited

    def _join(self, step: Step) -> StepResult | None:
        """Have the draft do its part of a step that the target has begun; returns the result, None
        when told to stop."""
        self._hub.raise_lost()
        if self._draft is not None and self._planner.drafting:
            self._planner.prepare(step, self._room(step))
            self._draft.send(self._planner.plan_draft(step, {}, {}))
        return self._result(step)

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
            backups = planner.prepare(step, self._room(step))
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
        if draft is not None and leased is not None and self._leases is not None:
            self._reporter.tell()
            draft.read, late = self._leases.follow(leased)
            if late:
                draft.missed("branches")
            self._desk.receive()
            return None
        return self._result(step)

    def _result(self, step: Step) -> StepResult | None:
        """What a step that is under way gives, None when told to stop."""
        self._reporter.tell()
        if self._draft is not None and self._planner.drafting:
            self._draft.drain(self._planner)
        # Rounds of their own on the GPUs are better than steps without the scheduler's word.
        if self._leases is None or not self._leases.takes(step):
            self._ahead.offer(step)
        return self._target.result(step.number, self._ahead.see_to_mail)

    def _room(self, step: Step) -> dict[int, int]:
        """The longest useful chain of each decoding row, by slot."""
        rows = step.decoding
        return {row.request.slot: self._scheduler.chain_room(row.request) for row in rows}

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

    def _flush_drops(self) -> None:
        """Let the draft free its blocks although no step is coming."""
        dropped = self._scheduler.take_dropped()
        if dropped and self._draft is not None and self._planner.drafting:
            self._draft.send(DraftPlan(round=0, rows=[], drop=dropped))
