"""Scheduler process: owns the requests, the target's blocks and the round loop.

One iteration is one round: take new requests, plan a step, tell draft and target, wait for the
outcomes, look them up in the speculation cache, and only then, with the next step under way, pass
the tokens on. It is also the hub of the group: every other process answers to it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
import zmq

from ipc import sockets
from ipc.channel import TypedReceiver, TypedSender
from ipc.doorbell import default_spin_us
from ipc.messages import (
    AbortRequest,
    AddRequest,
    DepthReady,
    DraftNotice,
    DraftPlan,
    DraftTimes,
    FromScheduler,
    Rejected,
    RowOutcome,
    SchedulerStats,
    StatsRequest,
    StepPlan,
    StepResult,
    TokensOut,
    ToScheduler,
)
from ipc.segments import open_segment
from procs import channels
from procs.hub import Hub
from procs.runtime import Runtime
from ssd_pipe.dimensions import Dimensions, dimensions
from ssd_pipe.engine.blocks import BlockManager, BlockTable
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.round_times import RoundTimes
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.scheduler import FAILED, Emission, Scheduler, Step
from ssd_pipe.engine.speculation_cache import SpeculationCache, size_bytes
from ssd_pipe.engine.synthetic import SyntheticOutcomes
from ssd_pipe.errors import PeerLost, RequestError

IDLE_POLL_MS = 200
PEER_POLL = 0.1  # seconds between looks at the peers while a step runs
STUCK = 120.0  # seconds a single step or backup may take
DEPTH_POLL = 0.005  # seconds; bounds the loss where the draft misses that someone waits

T = TypeVar("T")


def run(runtime: Runtime) -> None:
    """Body of the process "scheduler"."""
    sizes = dimensions(runtime.config)
    with Hub(runtime) as hub:
        loop = _Loop(runtime, hub, sizes)
        facts = hub.wait_ready(runtime.config.run.ready_timeout)
        loop.begin(min(f["num_blocks"] for f in facts.values() if "num_blocks" in f))
        own = {"max_model_len": sizes.max_model_len, "vocab_size": sizes.vocab_size}
        hub.announce(own)
        runtime.ready(own)
        try:
            loop.serve()
        except PeerLost as error:
            loop.fail_all(str(error))
            raise


class _Loop:
    def __init__(self, runtime: Runtime, hub: Hub, sizes: Dimensions) -> None:
        config = runtime.config
        self._runtime = runtime
        self._config = config
        self._hub = hub
        self._sizes = sizes
        self._planner = RoundPlanner(config.mode, config.speculation, None)
        self._scheduler = self._new_scheduler(sizes.target_blocks)
        self._synthetic = SyntheticOutcomes.of(config.speculation)
        self._cache: SpeculationCache | None = None
        self._deferred: list[Callable[[], None]] = []
        self._targets = [
            TypedSender.open(
                runtime,
                channels.target_plans(rank),
                StepPlan,
                capacity=sizes.target_plan_bytes,
            )
            for rank in range(config.target.tp)
        ]
        self._results: TypedReceiver[StepResult] = TypedReceiver.open(
            runtime, channels.RESULTS, StepResult, spin_us=default_spin_us()
        )
        self._draft: TypedSender[DraftPlan] | None = None
        self._notices: TypedReceiver[DraftNotice] | None = None
        if config.speculative:
            self._draft = TypedSender.open(
                runtime, channels.DRAFT_PLANS, DraftPlan, capacity=sizes.plan_bytes
            )
            self._notices = TypedReceiver.open(
                runtime, channels.DRAFT_NOTICES, DraftNotice, spin_us=default_spin_us()
            )
        self._requests = sockets.bind(zmq.PULL, runtime.rundir.endpoint("requests"))
        self._tokens = sockets.bind(zmq.PUSH, runtime.rundir.endpoint("tokens"))
        self._decoder = msgspec.msgpack.Decoder(ToScheduler)
        self._encoder = msgspec.msgpack.Encoder()
        self._poller = zmq.Poller()
        self._poller.register(self._requests, zmq.POLLIN)
        self._poller.register(runtime.stopping.fileno(), zmq.POLLIN)
        self._finished_requests = 0
        self._output_tokens = 0
        self._times = RoundTimes()

    def _new_scheduler(self, blocks: int) -> Scheduler:
        config = self._config
        return Scheduler(
            blocks=BlockManager(blocks, config.cache.block_size, config.cache.prefix_caching),
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=self._sizes.max_model_len,
            max_batched_tokens=config.scheduler.max_batched_tokens,
            lookahead=config.speculation.k if config.speculative else 0,
            max_waiting=config.scheduler.max_waiting,
        )

    def begin(self, target_blocks: int) -> None:
        """All processes are there: the target has so many KV blocks, the draft has made the
        speculation cache, which is mapped."""
        config, sizes = self._config, self._sizes
        self._scheduler = self._new_scheduler(target_blocks)
        if self._synthetic is not None:
            self._runtime.log.warning("synthetic acceptance: the text means nothing")
        if config.mode != "ssd":
            return
        shape = (sizes.slots, sizes.branches, sizes.k)
        segment = open_segment(
            self._runtime.rundir.segment("speculation-cache"), size_bytes(*shape)
        )
        cache = SpeculationCache(segment, *shape, create=False, vocab_size=sizes.vocab_size)
        self._cache = cache
        self._planner = RoundPlanner(config.mode, config.speculation, cache)

    # ------------------------------------------------------------ loop

    def serve(self) -> None:
        """Until the stop flag is up. Raises PeerLost when a process of the group is gone."""
        while not self._runtime.stopping.is_set():
            self._runtime.alive()
            self._hub.raise_lost()
            busy = self._scheduler.has_work
            if not busy:
                self._times.idle()
                self._flush_drops()
                self._poller.poll(IDLE_POLL_MS)
            self._take_requests()
            if self._scheduler.has_work:
                self._round()

    def _round(self) -> None:
        step = self._scheduler.schedule()
        if step is None:
            return
        now = time.monotonic_ns()
        for request in step.begun:
            request.scheduled_ns = request.scheduled_ns or now
        result = self._dispatch(step)
        if result is None:
            return  # told to stop
        chains = {row.request.slot: len(row.request.chain) for row in step.decoding}
        slots = [row.request.slot for row in step.sampled]
        emissions = self._scheduler.apply(step, self._outcomes(step, result, chains))
        for slot, emission in zip(slots, emissions, strict=True):
            self._planner.settle(emission, chains.get(slot, 0))
        queried = time.monotonic_ns()
        live = [e.request for e in emissions if not e.finish]
        for request in live:
            self._await_depth(request, len(live))
        for emission in emissions:
            self._planner.conclude(emission)
        # Told while the next step runs, which must not wait for it.
        self._deferred += [
            self._round_logger(step, result, emissions, queried),
            lambda: self._send_tokens(emissions, result),
        ]
        self._drain_notices()
        if not self._scheduler.has_work:
            self._run_deferred()

    def _run_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()

    def _outcomes(self, step: Step, result: StepResult, chains: dict[int, int]) -> list[RowOutcome]:
        """The step's outcomes, or what replays others in their place."""
        if self._synthetic is None:
            return result.outcomes
        replayed = []
        for row, outcome in zip(step.sampled, result.outcomes, strict=True):
            request = row.request

            def cached(slot: int, accepted: int, prefix: int = request.prefix_hash) -> list[int]:
                cache = self._cache
                return cache.recovery_tokens(slot, prefix, accepted) if cache else []

            chain = chains.get(request.slot, 0)
            replayed.append(self._synthetic.replace(outcome, chain, request.slot, cached))
        return replayed

    def _dispatch(self, step: Step) -> StepResult | None:
        """Send a step to draft and target; returns its result, None when stopping."""
        planner = self._planner
        if self._draft is None:
            self._send_step(step, {})
            return self._await_result(step)
        room = {row.request.slot: self._scheduler.chain_room(row.request) for row in step.decoding}
        backups = planner.prepare(step, room)
        plan, handovers = planner.plan_draft(step, backups)
        if backups:
            self._send_draft(plan)
            if not self._await_backups(step, plan, backups):
                return None
            self._send_step(step, handovers)
        else:
            self._send_step(step, handovers)
            self._send_draft(plan)
        return self._await_result(step)

    def _send_step(self, step: Step, handovers: dict[int, int]) -> None:
        plan = step.to_plan(handovers)
        for target in self._targets:
            target.send(plan)

    def _send_draft(self, plan: DraftPlan) -> None:
        if self._draft is not None and (plan.rows or plan.begin or plan.drop):
            self._draft.send(plan)

    def _flush_drops(self) -> None:
        """Let the draft free its blocks although no step is coming."""
        dropped = self._scheduler.take_dropped()
        if dropped and self._draft is not None:
            self._draft.send(DraftPlan(round=0, rows=[], drop=dropped))

    # ------------------------------------------------------------ waiting

    def _await(self, receiver: TypedReceiver[T], what: str, done: Callable[[T], bool]) -> T | None:
        """Messages until ``done`` likes one; None when stopping. Raises PeerLost."""
        self._run_deferred()
        deadline = time.monotonic() + STUCK
        while not self._runtime.stopping.is_set():
            message = receiver.recv(PEER_POLL)
            self._runtime.alive()
            if message is not None:
                if done(message):
                    return message
                continue
            self._hub.raise_lost()
            if time.monotonic() > deadline:
                raise PeerLost(f"no {what} within {STUCK:.0f} s")
        return None

    def _await_result(self, step: Step) -> StepResult | None:
        result: StepResult | None = self._await(
            self._results, "step result from target-0", lambda m: m.step == step.number
        )
        if result is not None:
            tokens = sum(row.count for row in step.rows) + sum(
                len(row.request.chain) for row in step.decoding
            )
            self._times.step(result, tokens)
            if all(row.decoding for row in step.rows):
                seconds = (result.finished_ns - result.started_ns) * 1e-9
                self._planner.times.observe_verify(tokens // len(step.rows), seconds)
        return result

    def _await_backups(self, step: Step, plan: DraftPlan, backups: dict[int, int]) -> bool:
        if self._notices is None:
            return False
        by_slot = {row.request.slot: row.request for row in step.decoding}
        pending = dict(backups)
        started = time.monotonic()

        def take(notice: DraftNotice) -> bool:
            if isinstance(notice, DraftTimes):
                self._learn_times(notice)
            elif isinstance(notice, DepthReady):
                pass  # of a wait that is over
            elif notice.round == plan.round and notice.slot in pending:
                del pending[notice.slot]
                self._planner.take_backup(by_slot[notice.slot], notice)
            return not pending

        if self._await(self._notices, "backup chain from the draft", take) is None:
            return False
        seconds = self._times.waited(time.monotonic() - started)
        self._times.backup_wait_seconds += seconds
        # Before a request's second token, the draft may have had its prompt to read first.
        if all(len(by_slot[slot].tokens) > by_slot[slot].prompt_len + 1 for slot in backups):
            self._planner.times.observe("backup_step", seconds / max(backups.values()))
        return True

    def _await_depth(self, request: Request, batch: int) -> None:
        """Let a hit grow while that pays."""
        planner, notices = self._planner, self._notices
        if notices is None or not planner.worth_waiting(request, batch):
            return
        started = time.monotonic()
        planner.announce_wait(True)
        try:
            while planner.worth_waiting(request, batch):
                if not planner.deepen(request):
                    notice = notices.recv(DEPTH_POLL)
                    if isinstance(notice, DraftTimes):
                        self._learn_times(notice)
                        if notice.round == planner.round:
                            planner.deepen(request)
                            break  # the draft has done what it will do
                self._runtime.alive()
                self._hub.raise_lost()
                if self._runtime.stopping.is_set() or time.monotonic() > started + STUCK:
                    return
        finally:
            planner.announce_wait(False)
        self._times.depth_wait_seconds += self._times.waited(time.monotonic() - started)

    def _learn_times(self, times: DraftTimes) -> None:
        self._times.draft_busy_seconds += (times.finished_ns - times.started_ns) * 1e-9
        if times.steps:
            seconds = (times.tree_ns - times.glue_ns) * 1e-9 / times.steps
            self._planner.times.observe("step", seconds)
            self._planner.times.observe("glue", (times.glue_ns - times.backup_ns) * 1e-9)

    def _drain_notices(self) -> None:
        while self._notices is not None:
            notice = self._notices.recv(0)
            if notice is None:
                return
            if isinstance(notice, DraftTimes):
                self._learn_times(notice)

    # ------------------------------------------------------------ frontend

    def _take_requests(self) -> None:
        while True:
            try:
                frame = self._requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._run_deferred()  # what is known of a request goes before what ends it
            message = self._decoder.decode(frame)
            if isinstance(message, AddRequest):
                self._add(message)
            elif isinstance(message, AbortRequest):
                request = self._scheduler.abort(message.rid)
                if request is not None:
                    self._planner.forget(request)
                    self._runtime.log.info("abort", rid=message.rid, reason=message.reason)
                    if message.reason == "stop":
                        self._send(TokensOut(message.rid, [], 0, "stop", request.stats()))
            elif isinstance(message, StatsRequest):
                self._send(SchedulerStats(message.token, self._stats(), self._hub.states()))

    def _add(self, message: AddRequest) -> None:
        request = Request.from_message(message, self._planner.hash0(message.key), BlockTable())
        try:
            self._scheduler.add(request)
        except RequestError as error:
            self._send(Rejected(message.rid, error.code, str(error), error.field))
            return
        self._runtime.log.info("add", rid=message.rid, prompt_tokens=request.prompt_len)

    def _send_tokens(self, emissions: list[Emission], result: StepResult) -> None:
        for emission in emissions:
            request = emission.request
            request.first_token_ns = request.first_token_ns or result.finished_ns
            request.last_token_ns = result.finished_ns
            self._output_tokens += len(emission.tokens)
            if emission.finish == FAILED:
                self._refuse_failed(emission)
                continue
            stats = None
            if emission.finish:
                stats = request.stats()
                self._finished_requests += 1
                self._runtime.log.info("finish", rid=request.rid, reason=emission.finish)
            self._send(
                TokensOut(
                    request.rid,
                    emission.tokens,
                    emission.accepted,
                    emission.finish,
                    stats,
                    emission.logprobs,
                )
            )

    def _refuse_failed(self, emission: Emission) -> None:
        rid, reason = emission.request.rid, emission.outcome.failure
        self._runtime.log.info("failed", rid=rid, reason=reason)
        error = RequestError(400, f"cannot be followed further: {reason}", "response_format")
        self._send(Rejected(rid, error.code, str(error), error.field))

    def _send(self, message: FromScheduler) -> None:
        try:
            self._tokens.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise PeerLost("the frontend no longer takes tokens") from None

    def fail_all(self, reason: str) -> None:
        """Tell every request that the pipeline is going down."""
        # Without a frontend there is nobody to tell, and the first loss is the one to report.
        with contextlib.suppress(PeerLost):
            self._run_deferred()
            for request in list(self._scheduler.requests()):
                self._send(Rejected(request.rid, 503, f"pipeline stopped: {reason}"))

    # ------------------------------------------------------------ figures

    def _round_logger(
        self, step: Step, result: StepResult, emissions: list[Emission], queried_ns: int
    ) -> Callable[[], None]:
        """Writes the round to the log as it is now."""
        return partial(
            self._runtime.log.info,
            "round",
            step=step.number,
            plan=self._planner.round,
            start=result.started_ns,
            end=result.finished_ns,
            query=queried_ns,
            rows=[
                {
                    "rid": e.request.rid,
                    "k": e.outcome.accepted,
                    "token": e.outcome.token,
                    "hit": e.request.entry >= 0,
                    "ready": len(e.request.chain),
                }
                for e in emissions
            ],
        )

    def _stats(self) -> dict[str, float]:
        scheduler, counters = self._scheduler, self._planner.counters
        blocks = scheduler.blocks
        values: dict[str, float] = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "free_blocks": blocks.num_free,
            "total_blocks": blocks.num_blocks,
            "prefix_query_tokens": blocks.query_tokens,
            "prefix_hit_tokens": blocks.hit_tokens,
            "preemptions": scheduler.preemptions,
            "finished_requests": self._finished_requests,
            "output_tokens": self._output_tokens,
        }
        values |= {
            name: value
            for name, value in msgspec.structs.asdict(self._times).items()
            if not name.startswith("_")
        }
        for name, value in msgspec.structs.asdict(counters).items():
            if isinstance(value, list):
                values |= {f"{name}_{i}": v for i, v in enumerate(value)}
            else:
                values[name] = value
        return values
