"""A scheduler's process but for its loop, and what a test plays at the other ends of its channels.

Ports, desk and engine are the real ones, in the test's own process.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import structlog
import zmq

from ipc import sockets
from ipc.channel import TypedReceiver, TypedSender
from ipc.messages.draft import DraftNotice, DraftPlan, DraftTimes
from ipc.messages.requests import (
    AddRequest,
    FromScheduler,
    ToScheduler,
)
from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Ahead, Found, StepPlan, StepResult
from ipc.rundir import RunDir
from procs import channels
from procs.admission import make_scheduler
from procs.draft_port import DraftPort
from procs.frontend_port import FrontendPort
from procs.going_ahead import GoingAhead, going_ahead
from procs.hub import Hub
from procs.liveness import StopFlag
from procs.reporter import Reporter
from procs.request_desk import RequestDesk
from procs.runtime import Runtime
from procs.target_port import TargetPort
from procs.waiting import Waiter
from ssd_pipe.config import PipelineConfig, config_from_mapping
from ssd_pipe.dimensions import Dimensions, plan_bytes
from ssd_pipe.engine.round_times import RoundTimes
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.step import Step
from tests.engine.test_leases import World
from tests.waiting import WAIT, wait_for

BLOCKS, BLOCK, SLOTS, MAX_LEN, VOCAB, K = 60, 4, 3, 64, 9, 3
SIZES = Dimensions(MAX_LEN, VOCAB, BLOCKS, BLOCKS, 0, SLOTS, 8, 8, K, plan_bytes(SLOTS, 64, BLOCK))
PROMPT, OTHER = [5, 7, 3], [1, 2]


def settings(**more: Any) -> PipelineConfig:
    speculation = {"k": K, "backup": "none", "adaptive": False} | more.pop("speculation", {})
    limits = {"max_num_seqs": SLOTS, "max_model_len": MAX_LEN}
    base = {"speculation": speculation, "scheduler": limits, "cache": {"block_size": BLOCK}}
    return config_from_mapping(base | more)


def process(name: str, config: PipelineConfig, rundir: RunDir) -> Runtime:
    return Runtime(name, 0, config, rundir, structlog.get_logger(), StopFlag(), 1)


class Target:
    """Runs no model, and goes on when the test says so.

    Attributes:
        heard: what it was sent and the test has not looked at.
        blocks: its block table of each slot.
        leave: the last that it was given.
    """

    def __init__(self, runtime: Runtime, world: World) -> None:
        plans = channels.target_plans(0)
        self.inbox: TypedReceiver[StepPlan | Ahead] = TypedReceiver.open(
            runtime, plans, StepPlan | Ahead, capacity=SIZES.plan_bytes
        )
        self._results: TypedSender[StepResult] = TypedSender.open(
            runtime, channels.RESULTS, StepResult
        )
        self._world = world
        self.blocks: dict[int, list[int]] = {}
        self.leave: Ahead | None = None

    def hear(self) -> list[StepPlan | Ahead]:
        """What it has been sent since it was last asked."""
        heard = []
        while (message := self.inbox.recv(0)) is not None:
            heard.append(message)
            if isinstance(message, StepPlan):
                self._take({row.slot: row.blocks for row in message.rows})
            elif message.rows:
                self.leave = message
        return heard

    def answer(self, step: Step, found: list[Found] | None = None) -> None:
        """The result of a step; with ``found``, it has begun the next one under its leave."""
        outcomes = [
            self._world.outcome(
                row.request.rid, len(row.request.tokens), row.request.chain if row.decoding else []
            )
            for row in step.sampled
        ]
        if found is not None:
            assert self.leave is not None
            assert self.leave.after == step.number
            rows = zip(step.rows, self.leave.rows, strict=True)
            self._take({row.request.slot: own.blocks for row, own in rows})
        self._results.send(StepResult(step.number, outcomes, 1, 2, 3, found=found or []))

    def _take(self, blocks: dict[int, list[int]]) -> None:
        for slot, new in blocks.items():
            self.blocks.setdefault(slot, []).extend(new)


class Draft:
    """A draft that is ready."""

    def __init__(self, runtime: Runtime) -> None:
        runtime.connect(runtime.rundir.endpoint("hub"))
        assert runtime.link is not None
        self.link = runtime.link
        self._plans: TypedReceiver[DraftPlan] = TypedReceiver.open(
            runtime, channels.draft_plans(0), DraftPlan, capacity=SIZES.plan_bytes
        )
        self._notices: TypedSender[DraftNotice] = TypedSender.open(
            runtime, channels.draft_notices(0), DraftNotice
        )
        self.link.ready({}, WAIT)

    def answer(self) -> None:
        """The fresh plan that comes after others, or as the first."""
        while (plan := self._plans.recv(WAIT)) is not None and not plan.fresh:
            pass
        assert plan is not None
        self._notices.send(DraftTimes(plan.round, 0, 0, 0, 0, 0, 0, 0, BLOCKS))


class Process:
    """The scheduler's process but for its loop, whose turns the test takes."""

    def __init__(self, rundir: RunDir, stack: contextlib.ExitStack, mode: str) -> None:
        config = settings(mode=mode)
        self.world = World(3)
        runtime = process("scheduler", config, rundir)
        hub = stack.enter_context(Hub(runtime))
        waiter, times = Waiter(runtime, hub), RoundTimes()
        self.frontend = FrontendPort(runtime, waiter)
        self.port = TargetPort(runtime, SIZES, waiter)
        self.draft = DraftPort(runtime, SIZES, waiter, times) if mode == "ssd" else None
        self.scheduler = make_scheduler(config, SIZES, BLOCKS)
        self.planner = RoundPlanner(config.mode, config.speculation, None)
        reporter = Reporter(self.frontend, self.planner, runtime.log)
        self.desk = RequestDesk(
            runtime.log,
            hub,
            self.frontend,
            self.scheduler,
            self.planner,
            times,
            self.draft,
            reporter,
        )
        aheads = going_ahead(config, self.scheduler, self.planner)
        self.ahead = GoingAhead(aheads, self.port, self.desk, self.draft)
        self.target = Target(process("target", config, rundir), self.world)
        self._mail = sockets.connect(zmq.PUSH, rundir.endpoint("requests"))
        self._tokens = sockets.connect(zmq.PULL, rundir.endpoint("tokens"))
        stack.callback(self._mail.close)
        stack.callback(self._tokens.close)
        hub.announce({})
        if self.draft is not None:
            self.mate = Draft(process("draft", config, rundir))
            stack.callback(self.mate.link.close)
            self.draft.begin(BLOCKS)
            assert not self.drafting()
            self.mate.answer()
            wait_for(self.drafting)

    def drafting(self) -> bool:
        """Whether the draft has answered."""
        assert self.draft is not None
        self.draft.look(self.planner, ())
        return self.draft.usable

    # ------------------------------------------------------------ the frontend

    def post(self, message: ToScheduler) -> None:
        self._mail.send(msgspec.msgpack.encode(message))

    def mail(self, message: ToScheduler) -> None:
        """The same, until it is there."""
        self.post(message)
        self.frontend.wait(WAIT)

    def told(self) -> FromScheduler:
        assert self._tokens.poll(round(WAIT * 1000))
        return msgspec.msgpack.decode(self._tokens.recv(), type=FromScheduler)

    # ------------------------------------------------------------ the loop's turns

    def start(self) -> Step:
        """Plan a step and have the target begin it; leave is given where it may be."""
        self.desk.attend()
        self.scheduler.lookahead = self.planner.decide(self.scheduler.load).k
        step = self.scheduler.schedule()
        assert step is not None
        self._tell_draft(step)
        self.port.send(step.to_plan({}))
        self.ahead.offer(step)
        return step

    def end(self, step: Step) -> Step | None:
        """Commit a step; returns the next one if the target has begun it, with leave to go on."""
        result = self.port.result(step.number, self.ahead.see_to_mail)
        assert result is not None
        chains = [len(r.request.chain) if r.decoding else 0 for r in step.sampled]
        emissions = self.scheduler.apply(step, result.outcomes)
        for i, (emission, chain) in enumerate(zip(emissions, chains, strict=True)):
            if result.found:
                own = result.found[i]
                self.planner.settle_found(emission, chain, own.chain, own.entry)
            else:
                self.planner.settle(emission, chain)
            self.planner.conclude(emission)
        following = self.ahead.follow(step, result)
        if following is not None:
            self._tell_draft(following)
            self.ahead.offer(following)
        return following

    def _tell_draft(self, step: Step) -> None:
        if self.draft is not None and self.planner.drafting:
            rows = step.decoding
            room = {r.request.slot: self.scheduler.chain_room(r.request) for r in rows}
            self.planner.prepare(step, room)
            self.draft.send(self.planner.plan_draft(step, {}, {}))

    # ------------------------------------------------------------ scenes

    def decoding(self) -> Step:
        """A request has its first token, and the step after that is under way with leave to go on;
        the target has heard of both."""
        self.mail(AddRequest(1, PROMPT, 40, NoiseKey(), [], 0))
        self.desk.wait(WAIT)
        prompt = self.start()
        self.target.answer(prompt)
        assert self.end(prompt) is None
        step = self.start()
        assert [type(heard) for heard in self.target.hear()] == [StepPlan, StepPlan, Ahead]
        assert self.target.leave is not None
        assert self.target.leave.after == step.number
        return step

    def check(self, count: int) -> None:
        """The first request has ``count`` tokens of output, those of the target, and both sides
        agree on its blocks."""
        [request] = [r for r in self.scheduler.running if r.rid == 1]
        output = request.tokens[len(PROMPT) :]
        begin = len(PROMPT)
        assert output == [self.world.target(1, begin + i) for i in range(count)]
        self.target.hear()
        assert self.target.blocks[request.slot] == request.table.blocks[: request.announced]
