"""What the scheduler tells of its rounds: tokens to the frontend, lines to the log, figures.

A round is noted when its outcome is known and told while the next step runs, which must not wait
for it.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import msgspec
from structlog.typing import FilteringBoundLogger

from ipc.messages.requests import TokensOut
from ipc.messages.target import StepResult
from procs.draft_port import DraftPort
from procs.frontend_port import FrontendPort
from procs.prompt_progress import PromptProgress
from ssd_pipe.engine.round_pace import RoundSeen
from ssd_pipe.engine.round_times import RoundTimes
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.engine.step import FAILED, Emission, Row, Step
from ssd_pipe.errors import RequestError

COLLECT_EVERY = 256  # rounds between garbage collections, which run while the target computes
COLLECT_ALL_EVERY = 64 * COLLECT_EVERY


@dataclass(slots=True)
class _Told:
    """What a round has to tell while the next one runs: its tokens, its times, its log line.

    ``waited_ns``: end of a wait for the draft, 0 if there was none. ``prompts``: rows that read a
    part of a prompt, and not the last one.
    """

    step: int
    plan: int
    sent_ns: int
    result: StepResult
    seen: RoundSeen
    queried_ns: int
    waited_ns: int
    emissions: list[Emission]
    rows: list[dict[str, object]]
    prompts: list[Row]


class Reporter:
    """Owns what the last round has still to tell.

    Attributes:
        sent_ns: when the present step's plan went to the target.
    """

    def __init__(
        self, frontend: FrontendPort, planner: RoundPlanner, log: FilteringBoundLogger
    ) -> None:
        self._frontend = frontend
        self._planner = planner
        self._log = log
        self._progress = PromptProgress(log)
        self._untold: _Told | None = None
        self._finished_requests = 0
        self._output_tokens = 0
        self.sent_ns = 0

    def note(
        self,
        step: Step,
        result: StepResult,
        verified: list[int],
        emissions: list[Emission],
        cache_ns: tuple[int, int],
        seconds: float = 0.0,
    ) -> None:
        """Keep what a round has to tell, as it is now.

        ``verified``: chain tokens of each emission. ``cache_ns``: when the cache had been looked
        up, and when a wait for more of a chain ended (0 = none). ``seconds``: since the round
        before ended, 0 if that says nothing of the effort.
        """
        decoding = len(step.decoding) == len(step.rows) == len(verified)
        seen = RoundSeen(
            decision=self._planner.decision,
            fed=sum(row.count for row in step.rows) + sum(verified),
            verify_seconds=(result.finished_ns - result.started_ns) * 1e-9,
            seconds=seconds,
            chains=verified if decoding else [],
        )
        rows: list[dict[str, object]] = [
            {
                "rid": e.request.rid,
                "chain": chain,
                "k": e.outcome.accepted,
                "token": e.outcome.token,
                # Of an answer that has ended nothing was looked up.
                "hit": None if e.finish else e.request.entry >= 0,
                "ready": len(e.request.chain),
            }
            for e, chain in zip(emissions, verified, strict=True)
        ]
        self._untold = _Told(
            step.number,
            self._planner.round,
            self.sent_ns,
            result,
            seen,
            *cache_ns,
            emissions,
            rows,
            [row for row in step.rows if not row.sample],
        )

    def tell(self) -> None:
        """Send the last round's tokens, learn its times and log it, once."""
        told, self._untold = self._untold, None
        if told is None:
            return
        result = told.result
        for emission in told.emissions:
            self._send_tokens(emission, result.finished_ns)
        emitted = sum([emission.outcome.accepted + 1 for emission in told.emissions])
        self._planner.pace.observe(told.seen, emitted)
        self._log.info(
            "round",
            step=told.step,
            plan=told.plan,
            sent=told.sent_ns,
            start=result.started_ns,
            end=result.finished_ns,
            query=told.queried_ns,
            waited=told.waited_ns,
            rows=told.rows,
        )
        self._progress.note(told.prompts, result.finished_ns)
        if told.step % COLLECT_EVERY == 0:
            gc.collect(1 if told.step % COLLECT_ALL_EVERY else 2)

    def _send_tokens(self, emission: Emission, finished_ns: int) -> None:
        request = emission.request
        request.first_token_ns = request.first_token_ns or finished_ns
        request.last_token_ns = finished_ns
        self._output_tokens += len(emission.tokens)
        if emission.finish == FAILED:
            reason = emission.outcome.failure
            self._log.info("failed", rid=request.rid, reason=reason)
            text = f"cannot be followed further: {reason}"
            self._frontend.reject(request.rid, RequestError(400, text, "response_format"))
            return
        stats = None
        if emission.finish:
            stats = request.stats()
            self._finished_requests += 1
            self._log.info("finish", rid=request.rid, reason=emission.finish)
        self._frontend.send(
            TokensOut(
                request.rid,
                emission.tokens,
                emission.accepted,
                emission.finish,
                stats,
                emission.logprobs,
                emission.drafted,
            )
        )

    def figures(
        self, scheduler: Scheduler, times: RoundTimes, draft: DraftPort | None
    ) -> dict[str, float]:
        """Counters and gauges by name."""
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
        if draft is not None:
            values["degraded"] = float(bool(draft.trouble))
            values["draft_losses"] = draft.losses
            if self._planner.drafting:
                draft.drain(self._planner)
            values["draft_free_blocks"] = draft.free_blocks
            values["draft_total_blocks"] = draft.total_blocks
        values |= {
            "effort_k": self._planner.effort.k,
            "effort_branches": self._planner.effort.branches,
            "probes": self._planner.pace.efforts.probes,
        }
        totals = msgspec.structs.asdict(times) | msgspec.structs.asdict(self._planner.counters)
        for name, value in totals.items():
            if isinstance(value, list):
                values |= {f"{name}_{i}": v for i, v in enumerate(value)}
            elif not name.startswith("_"):
                values[name] = value
        return values
