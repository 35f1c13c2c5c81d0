"""How fast rounds go, and what that says of waiting and of drafting just in time.

Joins the estimators of ``pacing`` and the controller of ``adaptive`` for one pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipc.round_records import WAIT_BRANCHES
from ssd_pipe.config import Mode, SpeculationSection, branch_budget
from ssd_pipe.engine.adaptive import Decision, EffortController
from ssd_pipe.engine.pacing import (
    AcceptanceEstimator,
    StageTimes,
    VerifyTime,
    best_chain_length,
    worth_waiting,
)


@dataclass(slots=True, kw_only=True)
class RoundSeen:
    """What a round was like.

    Attributes:
        decision: how much it was to speculate.
        fed: tokens of the target's step.
        verify_seconds: time of that step.
        seconds: since the round before ended, 0 if the pipeline was idle.
        chains: length of each row's chain; empty if there were prompts among the rows.
    """

    decision: Decision
    fed: int
    verify_seconds: float
    seconds: float
    chains: list[int]


class RoundPace:
    """Running estimates for one pipeline.

    Attributes:
        acceptance: chance of a draft token, by position.
        times: stage times in seconds ("verify" by tokens, "step", "glue", "backup_step").
        efforts: chooses how much each round speculates.
    """

    def __init__(self, mode: Mode, spec: SpeculationSection) -> None:
        self.acceptance = AcceptanceEstimator(spec.k)
        self.times = StageTimes()
        self.efforts = EffortController(
            mode,
            spec.k,
            branch_budget(spec),
            self.acceptance,
            adaptive=spec.adaptive,
            disable_by_batch_size=spec.disable_by_batch_size,
            in_turn=spec.backup in ("auto", "jit"),
        )

    def observe(self, seen: RoundSeen, emitted: int) -> None:
        """Learn from a round that is over, of which so many tokens came."""
        self.efforts.observe_step(seen.decision, seen.fed, seen.verify_seconds)
        if not seen.chains:
            return
        self.times.observe_verify(seen.fed // len(seen.chains), seen.verify_seconds)
        if seen.seconds:
            self.efforts.observe(seen.decision, seen.seconds, seen.chains, emitted)

    def worth_waiting(self, ready: int, k: int) -> bool:
        """Whether a hit with so many tokens ready should wait for the draft's next depth, in a
        round of chains of ``k`` (see ``pacing``).

        Always for its first token: the pass that makes it is under way, and any other chain could
        only be drafted after it.
        """
        step = self.times.time("step")
        if not ready or not step:
            return not ready
        return worth_waiting(self.acceptance.per_position(), ready, self._round_time(k), step)

    def lease_waits(self, k: int, batch: int) -> int:
        """The depths that leased rounds wait for, as bits of ``messages.Lease.waits``.

        Branches that are late are always waited for: to draft a chain just in time, the draft
        would have to end the same pass first.
        """
        waits = WAIT_BRANCHES | 1
        if batch == 1 and self.times.time("step"):
            depth = 1
            while depth < k and self.worth_waiting(depth, k):
                waits |= 1 << depth
                depth += 1
        return waits

    def jit_length(self, k: int) -> int | None:
        """Tokens worth drafting while the target waits, at most ``k``; None as long as the time
        they take is not known."""
        step = self.times.time("backup_step")
        if not step:
            return None
        return best_chain_length(self.acceptance.per_position(), self._round_time(k), step, step, k)

    def _round_time(self, k: int) -> VerifyTime:
        """Seconds of a round by the tokens it verifies, if the draft is to finish as well.

        A verification shorter than the draft's own round leaves the next one without branches.
        """
        verify = self.times.verify
        drafting = self.times.time("glue") + k * self.times.time("step")
        return lambda tokens: max(verify(tokens), drafting)
