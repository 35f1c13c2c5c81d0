"""Where the time of rounds goes."""

from __future__ import annotations

import msgspec

from ipc.messages.target import StepResult

OVERHEAD_BIN = 100e-6  # seconds
OVERHEAD_BINS = 40


class RoundTimes(msgspec.Struct):
    """Where the time of rounds went, seconds since start.

    ``overhead`` is what lies between two verifications (scheduler, messages, cache query) without
    the waits for the draft; rounds that follow an idle spell are not counted in it. A mean says
    what it costs in all; ``overhead_at``, how many rounds had how many times OVERHEAD_BIN of it
    (the last: more), says what a round costs that nothing else on the machine got in the way of.
    ``draft_busy`` is the mean of the draft workers.
    """

    verify_seconds: float = 0.0
    forward_seconds: float = 0.0
    overhead_seconds: float = 0.0
    overhead_rounds: int = 0
    overhead_at: list[int] = msgspec.field(default_factory=lambda: [0] * OVERHEAD_BINS)
    backup_wait_seconds: float = 0.0
    depth_wait_seconds: float = 0.0
    draft_busy_seconds: float = 0.0
    tokens_fed: int = 0
    steps: int = 0
    _last_end_ns: int = 0
    _waited: float = 0.0

    def idle(self) -> None:
        """Nothing runs: the next gap is no overhead."""
        self._last_end_ns = 0

    def waited(self, seconds: float) -> float:
        """The gap now open holds a wait for the draft; returns ``seconds``."""
        self._waited += seconds
        return seconds

    def target_waited(self, result: StepResult) -> None:
        """After the step that gave ``result``, the target itself waited for branches or for more
        of a chain, or not."""
        if result.waited_ns:
            seconds = (result.waited_ns - result.looked_up_ns) * 1e-9
            self.depth_wait_seconds += self.waited(seconds)

    def step(self, result: StepResult, tokens: int) -> float:
        """A step has ended; returns the seconds since the one before did, 0 after an idle spell."""
        whole = (result.finished_ns - self._last_end_ns) * 1e-9 if self._last_end_ns else 0.0
        self.steps += 1
        self.tokens_fed += tokens
        self.verify_seconds += (result.finished_ns - result.started_ns) * 1e-9
        self.forward_seconds += (result.forward_ns - result.started_ns) * 1e-9
        if self._last_end_ns:
            gap = (result.started_ns - self._last_end_ns) * 1e-9 - self._waited
            gap = max(0.0, gap)
            self.overhead_seconds += gap
            self.overhead_rounds += 1
            self.overhead_at[min(int(gap / OVERHEAD_BIN), OVERHEAD_BINS - 1)] += 1
        self._last_end_ns = result.finished_ns
        self._waited = 0.0
        return whole
