"""The scheduler's mail: requests, their ends, and questions about the state of things.

Messages are fetched whenever there is time. Requests and their ends are dealt with between two
steps; questions, which change nothing, at once: they must not hold up the next step.
"""

from __future__ import annotations

import contextlib

from structlog.typing import FilteringBoundLogger

from ipc.messages.requests import (
    AbortRequest,
    AddRequest,
    SchedulerStats,
    StatsRequest,
    TokensOut,
)
from procs.draft_port import DraftPort
from procs.frontend_port import FrontendPort
from procs.hub import Hub
from procs.liveness import farewell
from procs.reporter import Reporter
from ssd_pipe.engine.blocks import BlockTable
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.round_times import RoundTimes
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.errors import PeerLost, RequestError


class RequestDesk:
    """Takes the frontend's messages to the scheduler and answers those that have an answer."""

    def __init__(
        self,
        log: FilteringBoundLogger,
        hub: Hub,
        frontend: FrontendPort,
        scheduler: Scheduler,
        planner: RoundPlanner,
        times: RoundTimes,
        draft: DraftPort | None,
        reporter: Reporter,
    ) -> None:
        self._log = log
        self._hub = hub
        self._frontend = frontend
        self._scheduler = scheduler
        self._planner = planner
        self._times = times
        self._draft = draft
        self._reporter = reporter
        self._arrived: list[AddRequest | AbortRequest] = []
        self._questions: list[StatsRequest] = []

    def wait(self, seconds: float) -> None:
        """Until there is something to attend to, the stop flag is up, or the time is over."""
        if not self._arrived:  # what was fetched while a step ran rings nobody again
            self._frontend.wait(seconds)
        self.has_mail()

    def receive(self) -> None:
        """Fetch what the frontend has sent; a socket is looked at while the target computes, since
        between two steps even that is felt."""
        while (message := self._frontend.receive()) is not None:
            if isinstance(message, StatsRequest):
                self._questions.append(message)
            else:
                self._arrived.append(message)

    def fileno(self) -> int:
        """Readable when there may be something to ``receive``."""
        return self._frontend.fileno()

    def has_mail(self) -> bool:
        """Fetch what has come and answer questions; whether anything waits to be dealt with."""
        self.receive()
        questions, self._questions = self._questions, []
        for question in questions:
            self._frontend.send(self._stats(question))
        return bool(self._arrived)

    def attend(self) -> None:
        """Deal with what has come; call between steps. Raises PeerLost if the frontend is gone."""
        if not self._arrived:
            return
        arrived, self._arrived = self._arrived, []
        if any(isinstance(message, AbortRequest) for message in arrived):
            self._reporter.tell()  # what is known of a request goes before what ends it
        for message in arrived:
            if isinstance(message, AddRequest):
                self._add(message)
            else:
                self._abort(message)

    def _add(self, message: AddRequest) -> None:
        request = Request.from_message(message, self._planner.hash0(message.key), BlockTable())
        try:
            self._scheduler.add(request)
        except RequestError as error:
            self._frontend.reject(message.rid, error)
            return
        self._log.info("add", rid=message.rid, prompt_tokens=request.prompt_len)

    def _abort(self, message: AbortRequest) -> None:
        request = self._scheduler.abort(message.rid)
        if request is None:
            return
        self._planner.forget(request)
        self._log.info("abort", rid=message.rid, reason=message.reason)
        if message.reason == "stop":
            self._frontend.send(TokensOut(message.rid, [], 0, "stop", request.stats()))

    def _stats(self, message: StatsRequest) -> SchedulerStats:
        trouble = self._draft.trouble if self._draft is not None else ""
        figures = self._reporter.figures(self._scheduler, self._times, self._draft)
        figures["hub_bad_messages"] = self._hub.bad_messages
        return SchedulerStats(message.token, figures, self._hub.states(), trouble)

    def fail_all(self, reason: str) -> None:
        """Tell every request that the pipeline is going down."""
        error = farewell(reason)
        # Without a frontend there is nobody to tell, and the first loss is the one to report.
        with contextlib.suppress(PeerLost):
            self._reporter.tell()
            for request in list(self._scheduler.requests()):
                self._frontend.reject(request.rid, error)
