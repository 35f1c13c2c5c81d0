"""Acceptance and hits recorded on a real pair, replayed where models know nothing of each other.

The file is JSON::

    {"k": 5, "pair": "smollm2-135m-instruct / smollm2-draft-16m", "temperature": 0.0,
     "rounds": [{"accepted": 5, "hit": true, "chain": 5},
                {"accepted": 0, "hit": true, "chain": 4}]}

with the rounds in the order they came: draft tokens accepted, whether the outcome was in the
speculation cache, and length of the chain that was verified. Other keys are left alone.

What a request meets is its own course through the file, from a start of its own and over again, so
a batch does not march in step and batch mates do not change it. A round is replayed as it was as
far as the chain at hand allows:

* refused at token n, and the chain is longer than n: n accepted, hit as recorded;
* the chain is no longer than what was accepted: all of it is accepted;
* all of a recorded chain was accepted and the one at hand is longer: what the pair would have said
  of the tokens beyond was never seen; they are drawn one by one at the trace's own acceptance at
  their position (beyond its K, at its last position's).

Where that gives another outcome than the recorded one, the hit is drawn at the trace's hit rate of
whole chains or of refused ones. A row without a chain takes nothing from the file.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ssd_pipe.config import MAX_K
from ssd_pipe.errors import ConfigError

FIELD = "speculation.synthetic_acceptance"
GOLDEN = 0.6180339887498949
MAX_COURSES = 1024
"""Requests whose place is kept, more than can run at once; beyond, the longest unasked is lost."""


class RecordedRound(msgspec.Struct, frozen=True):
    """One verification of a chain of ``chain`` draft tokens."""

    accepted: int
    hit: bool
    chain: int


class AcceptanceTrace(msgspec.Struct, frozen=True):
    """A recording; see the module's docstring. ``k``: most draft tokens a round."""

    k: int
    pair: str
    temperature: float
    rounds: list[RecordedRound]

    @property
    def label(self) -> str:
        """What it is, in words, for whoever prints figures made with it."""
        return (
            f"trace of {self.pair}, T={self.temperature:g}, K={self.k}, {len(self.rounds)} rounds"
        )

    def acceptance(self) -> list[float]:
        """Chance of draft token j = 0..k-1 given that all before it were accepted; a position
        that no chain reached is taken for the one before it."""
        rates: list[float] = []
        for j in range(self.k):
            judged = [r for r in self.rounds if r.chain > j and r.accepted >= j]
            reached = sum(r.accepted > j for r in judged)
            rates.append(reached / len(judged) if judged else (rates[-1] if rates else 0.0))
        return rates

    def hit_rate(self, whole: bool | None = None) -> float:
        """Share of outcomes in the cache: of all rounds, of those that accepted the whole chain,
        or of those that refused a token. Where there are none of a kind, of all."""
        of_kind = [r.hit for r in self.rounds if whole in (None, r.accepted == r.chain)]
        return sum(of_kind) / len(of_kind) if of_kind else self.hit_rate()


def read_trace(path: Path) -> AcceptanceTrace:
    """Rounds without a chain are left out. Raises ConfigError naming what is wrong, and where."""
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=AcceptanceTrace)
    except OSError as error:
        raise ConfigError(FIELD, f"neither a rate nor a file: {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(FIELD, f"{path}: {error}") from None
    if not 1 <= trace.k <= MAX_K:
        raise ConfigError(FIELD, f"{path}: k must be 1..{MAX_K}, got {trace.k}")
    for number, r in enumerate(trace.rounds):
        if not 0 <= r.accepted <= r.chain <= trace.k:
            raise ConfigError(
                FIELD,
                f"{path}: rounds[{number}]: 0 <= accepted <= chain <= k = {trace.k} must hold, "
                f"got {r.accepted} of a chain of {r.chain}",
            )
    rounds = [r for r in trace.rounds if r.chain]
    if not rounds:
        raise ConfigError(FIELD, f"{path}: no round with a chain")
    return msgspec.structs.replace(trace, rounds=rounds)


@dataclass(slots=True)
class _Course:
    """One request's way through the trace."""

    at: int
    random: random.Random


class TraceReplay:
    """Plays a trace to any number of requests, each on a course of its own."""

    def __init__(self, trace: AcceptanceTrace, seed: int = 0) -> None:
        self._trace = trace
        self._seed = seed
        self._acceptance = trace.acceptance()
        self._hit_rate = {whole: trace.hit_rate(whole) for whole in (True, False)}
        self._courses: OrderedDict[int, _Course] = OrderedDict()
        self._begun = 0

    def draw(self, rid: int, chain: int) -> tuple[int, bool]:
        """(accepted, hit) of request ``rid``'s next round, which verifies ``chain`` tokens."""
        course = self._course(rid)
        if not chain:
            return 0, course.random.random() < self._hit_rate[False]
        rounds = self._trace.rounds
        recorded = rounds[course.at % len(rounds)]
        course.at += 1
        accepted = min(recorded.accepted, chain)
        if recorded.accepted == recorded.chain:
            while accepted < chain and course.random.random() < self._rate(accepted):
                accepted += 1
        same = accepted == recorded.accepted and (accepted == chain) == (
            recorded.accepted == recorded.chain
        )
        if same:
            return accepted, recorded.hit
        return accepted, course.random.random() < self._hit_rate[accepted == chain]

    def _rate(self, position: int) -> float:
        return self._acceptance[min(position, len(self._acceptance) - 1)]

    def _course(self, rid: int) -> _Course:
        course = self._courses.get(rid)
        if course is None:
            start = int(self._begun * GOLDEN % 1 * len(self._trace.rounds))
            course = _Course(start, random.Random(f"{self._seed} {self._begun}"))
            self._begun += 1
            self._courses[rid] = course
            if len(self._courses) > MAX_COURSES:
                self._courses.popitem(last=False)
        self._courses.move_to_end(rid)
        return course
