"""The scheduler's side of the target: plans out to every rank, results back from rank 0."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ipc.channel import TypedReceiver, TypedSender
from ipc.doorbell import default_spin_us
from ipc.messages.target import Ahead, StepPlan, StepResult
from procs import channels
from procs.runtime import Runtime
from procs.waiting import Waiter
from ssd_pipe.dimensions import Dimensions
from ssd_pipe.engine.leases import Leased


class TargetPort:
    """Opens the channels; the ranks may come later."""

    def __init__(self, runtime: Runtime, sizes: Dimensions, waiter: Waiter) -> None:
        self._waiter = waiter
        self._plans = [
            TypedSender.open(
                runtime,
                channels.target_plans(rank),
                StepPlan | Ahead,
                capacity=sizes.plan_bytes,
            )
            for rank in range(runtime.config.target.tp)
        ]
        self._results: TypedReceiver[StepResult] = TypedReceiver.open(
            runtime, channels.RESULTS, StepResult, spin_us=default_spin_us()
        )

    def send(self, plan: StepPlan, leased: Leased | None = None) -> None:
        """Start a step on every rank, or a lease."""
        if leased is not None:
            plan = replace(plan, lease=leased.terms)
        for rank in self._plans:
            rank.send(plan)

    def allow(self, leave: Ahead) -> None:
        """Give rank 0 leave to go ahead, or withdraw it."""
        self._plans[0].send(leave)

    def watch_mail(self, fd: int) -> None:
        """Let ``result`` see to the mail when ``fd`` is readable."""
        self._results.also_watch(fd)

    def result(self, step: int, mail: Callable[[], None]) -> StepResult | None:
        """What step number ``step`` gave; None when told to stop. Raises PeerLost.

        ``mail`` is called now and then, and when there is some (see ``watch_mail``), to fetch it.
        """
        return self._waiter.message(
            self._results, "target-0", "step result", lambda result: result.step == step, mail
        )

    def lease_end(self, step: int) -> StepResult | None:
        """How the lease that began with ``step`` ended, None if it has not. Does not wait."""
        result = self._results.recv(0)
        return result if result is not None and result.step == step else None
