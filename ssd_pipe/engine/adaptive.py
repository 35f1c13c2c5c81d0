"""How much to speculate, decided online by batch size, acceptance and measured round times.

Speculation pays while a target step is bound by reading the weights, and costs once it is bound by
arithmetic; where that turns depends on the machine, the models, the batch and the text. So the
controller compares efforts (see ``engine.effort``) by what rounds of them really took, wall time
with every wait in it, and by the tokens they give at the present acceptance. What was measured when
the machine was faster or slower is made comparable (``engine.slowness``). It never changes what is
emitted, only how fast.

Two bounds keep it cheap. *Exploration*: trying an effort that is not the best one is paid from a
credit that grows by ``SHARE`` of the time, and what is known to be much worse is tried again the
more seldom the worse it is. *Hysteresis*: a change needs a measured gain; only towards plain
decoding almost none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ssd_pipe.config import Mode
from ssd_pipe.engine.effort import OFF, Effort, Record, batch_bucket, batch_rows, neighbours
from ssd_pipe.engine.pacing import AcceptanceEstimator, StageTimes, expected_tokens
from ssd_pipe.engine.slowness import Slowness

SETTLE = 2  # rounds after a change that say little: the draft catches up, its cache is empty
PROBE_ROUNDS = SETTLE + 4
WARM_UP = 8  # rounds in which the draft reads what it was not told of, before a probe needs it
EVERY = 16  # rounds between two looks at the choice
WARM = 6  # rounds of the chosen effort before others are compared with it
SHARE = 0.02  # of the time, for trying other efforts
CREDIT, MOST_CREDIT = 2.0, 8.0  # rounds' time; at first, and at most
HOPELESS = 2.5  # times slower than a target step for each token, whatever it fed: ends at once
BEHIND, BEHIND_ROUNDS = 1.05, 2  # times slower than plain decoding by the times known: the same
OVERDRAFT = 1.0  # rounds' time; a trial that overspends so much ends
GAIN, GAIN_OFF = 1.03, 1.005  # rate over the present one's that makes a change
FORGET = 3000.0  # rounds in which a record's rate may have doubled, for all we know
FORGET_BOUND = 30000.0  # the same for a bound, which is generous already
HOPE = 0.1  # acceptance beyond the measured one that a bound allows for
PLAIN_ABOVE = 1  # rows from which a new batch size starts with plain decoding
FAR = 4  # buckets; beyond them one batch size says little of another
CHEAP = 0.7  # predicted rate from which plain decoding is tried at each batch size, at once


class Decision(NamedTuple):
    """What was decided for one round; ``observe`` takes it back with what came of it.

    Attributes:
        effort: how much the round speculates.
        bucket: its batch size (see ``batch_bucket``).
        same: rounds before it that had the same effort, one after the other.
        trial: it is there to learn from, and what it loses is paid from the credit.
        warming: it goes before a trial, for the draft to catch up.
    """

    effort: Effort
    bucket: int = 0
    same: int = 0
    trial: bool = False
    warming: bool = False


class EffortController:
    """Chooses each round's effort.

    Call ``decide`` before a round and ``observe`` after it. Pure: times come from the caller.

    Attributes:
        decision: the latest one.
        full: the effort that is configured.
        probes: efforts tried so far beside the best one.
    """

    def __init__(
        self,
        mode: Mode,
        k: int,
        budget: int,
        acceptance: AcceptanceEstimator,
        *,
        adaptive: bool = True,
        disable_by_batch_size: int = 0,
        in_turn: bool = True,
    ) -> None:
        """
        Args:
            k: longest chain.
            budget: most branches a row.
            acceptance: shared with whoever feeds it.
            adaptive: False always decides for ``k`` and ``budget``.
            disable_by_batch_size: rows above which nothing is speculated; 0 = no such limit.
            in_turn: whether drafting while the target waits may be chosen in ssd.
        """
        self._acceptance = acceptance
        self.full = {"ar": OFF, "sd": Effort(k, 0), "ssd": Effort(k, budget)}[mode]
        self._limit = disable_by_batch_size
        self._adaptive = adaptive and mode != "ar"
        self._neighbours = neighbours(mode, k, budget, in_turn)
        self._records: dict[int, dict[Effort, Record]] = {}
        self._chosen: dict[int, Effort] = {}
        self._slowness = Slowness()  # by which all times below are divided
        self._steps = {True: StageTimes(), False: StageTimes()}
        self._bucket = 0
        self._rows = 0
        self._probe: Effort | None = None
        self._probe_left = 0
        self._warm_left = 0
        self._same = 0
        self._round = 0
        self._look = 0
        self._credit = CREDIT
        self._step_seconds = 0.0
        self._effort_since = self.full
        self._seconds_since = self._expected_since = 0.0
        self.decision = Decision(self.full)
        self.probes = 0

    # ------------------------------------------------------------ each round

    def decide(self, rows: int) -> Decision:
        """For a round with so many decoding rows (at least 1)."""
        effort, warming = self.full, False
        if self._limit and rows > self._limit:
            effort = OFF
        elif self._adaptive:
            effort, warming = self._adapted(rows)
        last = self.decision
        same = last.same + 1 if effort == last.effort else 0
        trial = self._probe is not None
        self.decision = Decision(effort, batch_bucket(rows), same, trial, warming)
        return self.decision

    def observe_step(self, decision: Decision, tokens: int, seconds: float) -> None:
        """The target alone took so long for a step that fed ``tokens``, prompts included."""
        if self._adaptive:
            alone = decision.effort.alone
            self._slowness.observe((alone, tokens), seconds)
            self._step_seconds = seconds / self._slowness.now
            self._steps[alone].observe_verify(tokens, self._step_seconds)

    def observe(
        self, decision: Decision, seconds: float, chains: Sequence[int], emitted: int
    ) -> None:
        """A round without prompt chunks has ended; its step was the last one observed.

        Args:
            seconds: since the round before ended.
            chains: verified chain length of each row, at most the effort's.
            emitted: tokens of all rows.
        """
        effort, bucket, same, trial, warming = decision
        if not self._adaptive or (self._limit and len(chains) > self._limit):
            return
        if batch_bucket(len(chains)) != bucket:
            return  # decided for another batch
        self._round += 1
        seconds /= self._slowness.now
        acceptance = self._acceptance.per_position()
        by_length, reach = [1.0], 1.0
        for a in acceptance[: effort.k]:
            reach *= a
            by_length.append(by_length[-1] + reach)
        rows = len(chains)
        lengths = [rows] if effort == OFF else [0] * (effort.k + 1)
        if effort != OFF:
            for length in chains:
                lengths[length] += 1
        expected = sum([n * tokens for n, tokens in zip(lengths, by_length, strict=True)])
        record = self._record(bucket, effort)
        if trial:
            self._pay(bucket, seconds, expected / rows, acceptance)
            if self._credit < -OVERDRAFT and not record.rejected:
                self._probe_left = self._warm_left = 0
                record.rejected = not warming
        elif same and self._behind(decision, seconds, expected):
            # No need to see more of it before it is compared with plain decoding.
            record.rejected = True
            if self._probe is None and bucket == self._bucket:
                self._begin(OFF, 0)
        if (same >= SETTLE and not warming) or record.rejected:
            record.observe(self._round, seconds, lengths, emitted, expected)
        if trial:
            return
        self._credit = min(MOST_CREDIT, self._credit + SHARE)
        self._look += 1
        if self._look >= EVERY and self._probe is None and bucket == self._bucket:
            self._look = 0
            self._choose()
            self._consider_probe(acceptance)

    def _adapted(self, rows: int) -> tuple[Effort, bool]:
        """Effort, and whether the draft is to catch up meanwhile."""
        bucket = batch_bucket(rows)
        self._rows = rows
        if bucket != self._bucket:
            self._bucket, self._probe = bucket, None
        if self._probe is not None:
            if self._warm_left:
                self._warm_left -= 1
                return self._chosen[bucket], True
            if self._probe_left:
                self._probe_left -= 1
                return self._probe, False
            self._probe = None
            self._choose()
        chosen = self._chosen.get(bucket)
        if chosen is None:
            chosen = self._chosen[bucket] = self._first(bucket, rows)
            self._look = EVERY - WARM - SETTLE
        return chosen, False

    # ------------------------------------------------------------ choice

    def _first(self, bucket: int, rows: int) -> Effort:
        """For a batch size not met before: what would be best by one near it, where plain decoding
        and speculation were compared."""
        acceptance = self._acceptance.per_position()
        for other in self._near(bucket):
            records = self._records.get(other, {})
            known = [effort for effort, record in records.items() if record.known]
            if OFF in known and len(known) > 1:
                return max(
                    known,
                    key=lambda e: records[e].rate(acceptance) / self._slower(e, other, bucket),
                )
        return OFF if rows > PLAIN_ABOVE else self.full

    def _choose(self) -> None:
        """Change to an effort that was measured to be better here."""
        bucket = self._bucket
        present = self._chosen[bucket]
        if not self._known(bucket, present):
            return
        acceptance = self._acceptance.per_position()
        records = self._records[bucket]
        now = records[present].rate(acceptance)
        best, best_gain = present, 1.0
        for effort, record in records.items():
            if effort == present or not record.known:
                continue
            gain = record.rate(acceptance) / (now * (GAIN if effort != OFF else GAIN_OFF))
            if gain > best_gain:
                best, best_gain = effort, gain
        self._chosen[bucket] = best

    def _consider_probe(self, acceptance: Sequence[float]) -> None:
        """Try the most promising neighbour, if any promises more and the credit allows it."""
        bucket = self._bucket
        present = self._chosen[bucket]
        record = self._records.get(bucket, {}).get(present)
        if record is None or not record.known:
            return
        best, best_promise, best_cost = None, 1.0, 0.0
        for effort in self._neighbours[present]:
            ratio, age = self._compare(bucket, effort, present, acceptance)
            if effort == OFF and not self._known(bucket, OFF) and (ratio or 1.0) > CHEAP:
                promise, cost = float("inf"), float("-inf")  # does it pay at all?
            elif ratio is None:
                bound = self._bound(effort, record, acceptance)
                promise, cost = bound * (1 + age / FORGET_BOUND), PROBE_ROUNDS / 2
            else:
                promise, cost = ratio * (1 + age / FORGET), PROBE_ROUNDS * max(0.1, 1 - ratio)
            if promise > best_promise:
                best, best_promise, best_cost = effort, promise, cost
        if best is not None and self._credit >= best_cost:
            self._begin(best, WARM_UP if present == OFF else 0)

    def _begin(self, effort: Effort, warm_up: int) -> None:
        self._probe, self._probe_left, self._warm_left = effort, PROBE_ROUNDS, warm_up
        self.probes += 1

    def _behind(self, decision: Decision, seconds: float, expected: float) -> bool:
        """Whether the rounds since this effort began are slower than plain decoding, never tried
        at this batch size, would be by the step times known."""
        if decision.same == 1 or decision.effort != self._effort_since:
            # Its first round need not be among those observed: what was foreseen may be dropped.
            self._effort_since = decision.effort
            self._seconds_since = self._expected_since = 0.0
        self._seconds_since += seconds
        self._expected_since += expected
        if decision.effort == OFF or self._known(decision.bucket, OFF):
            return False
        plain = self._expected_since / self._rows * self._steps[True].verify(self._rows)
        whole = self._expected_since / self._rows * self._step_seconds
        return self._seconds_since > HOPELESS * whole or (
            decision.same > BEHIND_ROUNDS and self._seconds_since > BEHIND * plain > 0
        )

    def _compare(
        self, bucket: int, effort: Effort, present: Effort, acceptance: Sequence[float]
    ) -> tuple[float | None, float]:
        """Rate over the present effort's, by the nearest batch size that has had both, and how many
        rounds ago that was; None if nowhere."""
        for where in (bucket, *self._near(bucket)):
            if self._known(where, effort) and self._known(where, present):
                records = self._records[where]
                ratio = records[effort].rate(acceptance) / records[present].rate(acceptance)
                here = self._slower(effort, where, bucket) / self._slower(present, where, bucket)
                return ratio / here, self._round - records[effort].last
        return None, self._round

    def _slower(self, effort: Effort, bucket: int, other: int) -> float:
        """How many times longer the target's step of ``effort`` takes in the ``other`` bucket."""
        if bucket == other:
            return 1.0
        before, after = (round(batch_rows(b) * (effort.k + 1)) for b in (bucket, other))
        # What a step with every core shows of the larger batch, one without them does not escape.
        ratios = []
        for alone in {True, effort.alone}:
            seconds = self._steps[alone].verify(before, extrapolate=True)
            if seconds:
                ratios.append(self._steps[alone].verify(after, extrapolate=True) / seconds)
        return (max if after > before else min)(ratios, default=1.0)

    def _bound(self, effort: Effort, present: Record, acceptance: Sequence[float]) -> float:
        """Most that an effort never tried near here can do, over the present effort's rate: every
        chain in full and for nothing but the target's own time."""
        hoped = [min(0.95, a + HOPE) for a in acceptance]
        gain = expected_tokens(hoped, effort.k) / present.tokens(acceptance)
        tokens_fed = self._rows * (effort.k + 1)
        # What a step takes with every core, it takes at least without.
        seconds = max(
            self._steps[alone].verify(tokens_fed, extrapolate=True)
            for alone in {True, effort.alone}
        )
        return gain * present.seconds / seconds if seconds else gain

    def _pay(self, bucket: int, seconds: float, tokens: float, acceptance: Sequence[float]) -> None:
        """Take from the credit what a trial's round lost against the chosen effort."""
        chosen = self._records[bucket][self._chosen[bucket]]
        lost = seconds - tokens / chosen.rate(acceptance)
        self._credit -= max(0.0, lost) / chosen.seconds

    # ------------------------------------------------------------ records

    def _record(self, bucket: int, effort: Effort) -> Record:
        records = self._records.setdefault(bucket, {})
        record = records.get(effort)
        if record is None:
            record = records[effort] = Record(effort)
        return record

    def _known(self, bucket: int, effort: Effort) -> bool:
        record = self._records.get(bucket, {}).get(effort)
        return record is not None and record.known

    @staticmethod
    def _near(bucket: int) -> list[int]:
        """Other buckets, the nearest first."""
        return [b for d in range(1, FAR + 1) for b in (bucket - d, bucket + d) if b > 0]
