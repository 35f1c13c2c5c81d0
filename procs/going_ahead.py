"""The scheduler's part of going ahead: leave given in time, withdrawn when there is mail, followed.

See ``ssd_pipe.engine.ahead``. Mail withdraws the leave: a request that comes, or is to end, gets
its turn after the step that is running, or after the one behind it if a GPU has that queued.
"""

from __future__ import annotations

from ipc.messages.target import Ahead, StepResult
from procs.draft_port import DraftPort
from procs.request_desk import RequestDesk
from procs.target_port import TargetPort
from ssd_pipe.config import PipelineConfig
from ssd_pipe.engine.ahead import Aheads
from ssd_pipe.engine.rounds import RoundPlanner
from ssd_pipe.engine.scheduler import Scheduler
from ssd_pipe.engine.step import Step


def going_ahead(
    config: PipelineConfig, scheduler: Scheduler, planner: RoundPlanner
) -> Aheads | None:
    """Leave to go ahead, None where it cannot be given: other ranks would have to be told, and the
    target knows nothing of outcomes that are replaced."""
    spec = config.speculation
    if config.target.tp > 1 or (config.speculative and spec.synthetic_acceptance):
        return None
    return Aheads(scheduler, planner, spec)


class GoingAhead:
    """Keeps the leave that stands.

    Args:
        aheads: None where the target never goes ahead.
    """

    def __init__(
        self,
        aheads: Aheads | None,
        target: TargetPort,
        desk: RequestDesk,
        draft: DraftPort | None,
    ) -> None:
        self._aheads = aheads
        self._target = target
        self._desk = desk
        self._draft = draft
        self._leave: Ahead | None = None
        self._withdrawn = False
        if aheads is not None:
            target.watch_mail(desk.fileno())

    def offer(self, step: Step) -> None:
        """Give leave to go on after ``step``, which is under way, if that may be."""
        self._leave = None
        if self._desk.has_mail() or self._aheads is None:
            return
        if self._draft is not None and not self._draft.usable:
            return  # it is to be looked for between two steps
        self._leave = self._aheads.offer(step)
        if self._leave is not None:
            self._withdrawn = False
            self._target.allow(self._leave)

    def see_to_mail(self) -> None:
        """Fetch what has come; the leave ends with it."""
        if self._desk.has_mail() and self._leave is not None and not self._withdrawn:
            self._withdrawn = True
            self._target.allow(Ahead(self._leave.after))

    def follow(self, step: Step, result: StepResult) -> Step | None:
        """The step that the target has begun after ``step``, None if it has not."""
        leave, self._leave = self._leave, None
        if self._aheads is None or leave is None or not result.found:
            return None
        return self._aheads.follow(step, leave)
