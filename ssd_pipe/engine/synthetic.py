"""Replayed acceptance: outcomes that two models which do not know each other cannot give.

Shapes with random weights do all the work of a round and agree on nothing. To time the pipeline as
if they did, the scheduler puts a drawn or recorded outcome in the place of the real one, before it
looks at it: so many tokens of the chain accepted, and as recovery token one that the speculation
cache holds (a hit) or one that it does not. Whoever prints such figures says so.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from ipc.messages.target import RowOutcome
from ssd_pipe.config import SpeculationSection
from ssd_pipe.engine.acceptance_trace import FIELD, TraceReplay, read_trace
from ssd_pipe.engine.request import Request
from ssd_pipe.engine.step import Step
from ssd_pipe.errors import ConfigError

Cached = Callable[[int], list[int]]
"""Accepted length -> recovery tokens that would be a hit."""


class SyntheticOutcomes:
    """Outcomes by rate, or out of a file (see ``acceptance_trace``).

    Attributes:
        label: what they are made of, for whoever prints figures.
    """

    def __init__(self, acceptance: str, hit_rate: float, seed: int = 0) -> None:
        """Raises ConfigError for a rate outside 0..1 or a file that is no trace."""
        self._random = random.Random(seed)
        self._hit_rate = hit_rate
        self._rate = 0.0
        self._replay: TraceReplay | None = None
        try:
            self._rate = float(acceptance)
        except ValueError:
            trace = read_trace(Path(acceptance))
            self._replay = TraceReplay(trace, seed)
            self.label = trace.label
            return
        if not 0 <= self._rate <= 1:
            raise ConfigError(FIELD, f"a rate must be 0..1, got {acceptance}")
        self.label = f"{self._rate:g} a token, hit rate {hit_rate:g}"

    @classmethod
    def of(cls, spec: SpeculationSection) -> SyntheticOutcomes | None:
        """As configured; None if outcomes are real."""
        if not spec.synthetic_acceptance:
            return None
        return cls(spec.synthetic_acceptance, spec.synthetic_hit_rate)

    def replace_all(
        self, step: Step, outcomes: Sequence[RowOutcome], cached: Callable[[Request], Cached]
    ) -> list[RowOutcome]:
        """What stands for the outcomes of a step; ``cached`` is of a request."""
        return [
            self.replace(
                outcome,
                len(row.request.chain) if row.decoding else 0,
                row.request.rid,
                cached(row.request),
            )
            for row, outcome in zip(step.sampled, outcomes, strict=True)
        ]

    def replace(self, outcome: RowOutcome, chain: int, rid: int, cached: Cached) -> RowOutcome:
        """What stands for the ``outcome`` of a chain of so many tokens of request ``rid``.

        Where the cache holds nothing for the accepted length, a hit becomes a miss.
        """
        if self._replay is not None:
            accepted, hit = self._replay.draw(rid, chain)
        else:
            accepted, hit = self._draw(chain)
        known = cached(accepted)
        if hit and known:
            return RowOutcome(accepted, self._random.choice(known))
        # Downwards first: what lies below a token id is a token id too.
        below, above = range(outcome.token, -1, -1), itertools.count(outcome.token + 1)
        token = next(t for t in itertools.chain(below, above) if t not in known)
        return RowOutcome(accepted, token)

    def draws(self, rounds: int, chain: int) -> list[int]:
        """Outcomes of so many rounds ahead, for a GPU to replay: accepted * 2 + hit."""
        drawn = (self._draw(chain) for _ in range(rounds))
        return [accepted * 2 + hit for accepted, hit in drawn]

    def _draw(self, chain: int) -> tuple[int, bool]:
        accepted = 0
        while accepted < chain and self._random.random() < self._rate:
            accepted += 1
        return accepted, self._random.random() < self._hit_rate
