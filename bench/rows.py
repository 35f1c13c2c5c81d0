"""One table row per engine out of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bench import figures as st
from bench.bandwidth import Bandwidth
from bench.compare import Sample
from ssd_pipe.engine.round_times import OVERHEAD_BIN

TOTAL = "all"


class Row(msgspec.Struct, kw_only=True):
    """Figures of one engine; None where it has no such thing. Times in ms, rates per second.

    Attributes:
        set: prompt set; "all" in a row over several.
        point: what a sweep set for this row, by axis.
        batch: requests under way at a time.
        throughput: output tokens a second over whole requests, all of a batch together.
        tok_s: decode rate of a request: tokens after its first piece over their time, over all
            prompts of a repeat; median over repeats. ``tok_s_repeats`` has them all.
        ttft: time to the first piece, median over requests.
        itl_p50, itl_p99: time per token, a piece's gap shared out among its tokens.
        gap_p99: time between pieces.
        tokens_per_round: tokens of a target step after the first piece.
        accepted_mean: draft tokens accepted a round that had a chain.
        accepted_share: draft tokens accepted of those that were judged.
        acceptance: by position, see ``figures.acceptance_by_position``.
        hit_rate, hit_rate_by_k: share of cache queries that hit, overall and by accepted length.
        hit_after_hit, hit_after_miss: the same, by how the round before ended.
        round_time: time of a decode step from piece to piece.
        draft_busy, draft_exposed, draft_hidden: draft work a round, what the target waited for of
            it, and the rest.
        overhead: gap between two target steps a round, waits for the draft left out: scheduler,
            messages, cache query. ``overhead`` is the mean, ``overhead_median`` the median.
        judge: what a target step does after its last layer: output head, sampling, verification.
        mb_per_token: target weights read per token.
        gb_s: target weights read per second of decoding; ``copy_share`` and ``read_share`` are
            its shares of the measured bandwidths.
        speedup: over another engine by name: ratio of the repeats' rates, median over repeats.
        paired: over another engine by name: ratio of rates prompt by prompt, 25th, 50th and 75th
            percentile.
        same_tokens: answers that equal the first engine's, a share.
    """

    engine: str
    set: str = ""
    point: dict[str, Any] = {}
    batch: int = 1
    requests: int
    tokens: int
    tok_s: float | None
    tok_s_repeats: list[float]
    throughput: float | None = None
    ttft: float | None
    itl_p50: float | None
    itl_p99: float | None
    gap_p99: float | None
    tokens_per_round: float | None
    round_time: float | None
    accepted_mean: float | None = None
    accepted_share: float | None = None
    acceptance: list[float | None] = []
    hit_rate: float | None = None
    hit_rate_by_k: list[float | None] = []
    hit_after_hit: float | None = None
    hit_after_miss: float | None = None
    draft_busy: float | None = None
    draft_hidden: float | None = None
    draft_exposed: float | None = None
    overhead: float | None = None
    overhead_median: float | None = None
    judge: float | None = None
    mb_per_token: float | None = None
    gb_s: float | None = None
    copy_share: float | None = None
    read_share: float | None = None
    speedup: dict[str, float] = {}
    paired: dict[str, list[float]] = {}
    same_tokens: float | None = None
    counters: dict[str, float] = {}


def make_row(samples: Sequence[Sample], weight_bytes: int, bandwidth: Bandwidth | None) -> Row:
    """The row of one engine, without comparisons. Needs at least one sample."""
    answers = [s.answer for s in samples]
    repeats = [
        [s.answer for s in samples if s.repeat == n] for n in sorted({s.repeat for s in samples})
    ]
    rates = [rate for some in repeats if (rate := st.decode_rate(some))]
    seconds = sum(map(st.decode_seconds, answers))
    rounds = sum(map(st.decode_rounds, answers))
    tokens = sum(map(st.decode_tokens, answers))
    gb_s = st.ratio(weight_bytes * rounds * 1e-9, seconds) if weight_bytes else None
    counters = st.total([s.counters for s in samples])
    batch = samples[0].batch
    # Requests that run together share a step, and the weights it reads.
    steps = rounds if batch == 1 else counters.get("steps", rounds / batch)
    gaps = [gap for answer in answers for gap in st.token_gaps(answer)]
    pieces = [
        now - before
        for a in answers
        for (before, _), (now, _) in zip(a.arrivals, a.arrivals[1:], strict=False)
    ]
    firsts = [a.arrivals[0][0] - a.started for a in answers if a.arrivals]
    row = Row(
        engine=samples[0].engine,
        set=samples[0].set if len({s.set for s in samples}) == 1 else TOTAL,
        batch=batch,
        requests=len(samples),
        tokens=sum(len(a.tokens) for a in answers),
        tok_s=st.median(rates),
        tok_s_repeats=rates,
        throughput=st.median([r for some in repeats if (r := st.throughput(some, batch))]),
        ttft=_ms(st.median(firsts)),
        itl_p50=_ms(st.percentile(gaps, 50)),
        itl_p99=_ms(st.percentile(gaps, 99)),
        gap_p99=_ms(st.percentile(pieces, 99)),
        tokens_per_round=st.ratio(tokens, rounds),
        round_time=_ms(st.ratio(seconds, rounds)),
        mb_per_token=st.ratio(weight_bytes * steps * 1e-6, tokens) if weight_bytes else None,
        gb_s=gb_s,
    )
    if gb_s is not None and bandwidth is not None:
        row.copy_share = gb_s * 1e9 / bandwidth.copy
        row.read_share = gb_s * 1e9 / bandwidth.read
    _add_counted(row, counters, steps)
    return row


def _add_counted(row: Row, counters: dict[str, float], steps: float) -> None:
    """What the engine counted itself; engines differ in how much that is."""
    if not counters:
        # The engine counts nothing; what a step gives beyond its own token was accepted.
        if row.tokens_per_round is not None and row.tokens_per_round > 1:
            row.accepted_mean = row.tokens_per_round - 1
        return
    row.counters = counters

    def per(part: str, whole: str) -> float | None:
        return st.ratio(counters.get(part, 0.0), counters.get(whole, 0.0))

    row.overhead = _ms(per("overhead_seconds", "overhead_rounds"))
    row.overhead_median = _ms(
        st.histogram_median(st.indexed(counters, "overhead_at"), OVERHEAD_BIN)
    )
    if "verify_seconds" in counters:
        judging = counters["verify_seconds"] - counters["forward_seconds"]
        row.judge = _ms(st.ratio(judging, counters["steps"]))
    if not counters.get("rounds"):
        return
    row.accepted_mean = per("accepted", "rounds")
    row.accepted_share = st.ratio(counters["accepted"], sum(st.indexed(counters, "judged_at")))
    row.acceptance = st.acceptance_by_position(
        st.indexed(counters, "accepted_at"), st.indexed(counters, "judged_at")
    )
    if "hits" in counters:
        row.hit_rate = st.ratio(counters["hits"], counters["hits"] + counters["misses"])
    if row.hit_rate is not None:
        row.hit_rate_by_k = st.shares(
            st.indexed(counters, "hits_at"), st.indexed(counters, "misses_at")
        )
    if "draft_busy_seconds" in counters:
        waited = counters["backup_wait_seconds"] + counters["depth_wait_seconds"]
        busy = counters["draft_busy_seconds"]
        row.draft_busy, row.draft_exposed = _ms(st.ratio(busy, steps)), _ms(st.ratio(waited, steps))
        row.draft_hidden = _ms(st.ratio(max(0.0, busy - waited), steps))


def add_comparisons(
    rows: Sequence[Row], samples: Sequence[Sample], baselines: Sequence[str]
) -> None:
    """Fill what compares rows: over ``baselines``, and with the answers of the first row."""
    by_engine = {row.engine: [s for s in samples if s.engine == row.engine] for row in rows}
    rates = {
        name: {s.key: rate for s in mine if (rate := st.decode_rate([s.answer]))}
        for name, mine in by_engine.items()
    }
    wanted = {s.key: s.answer.tokens for s in by_engine[rows[0].engine]}
    by_name = {row.engine: row for row in rows}
    for row in rows:
        mine = by_engine[row.engine]
        same = sum(s.answer.tokens == wanted[s.key] for s in mine)
        row.same_tokens = same / len(mine)
        for name in baselines:
            if name not in by_name or name == row.engine:
                continue
            repeats = zip(row.tok_s_repeats, by_name[name].tok_s_repeats, strict=False)
            over = st.median([ours / theirs for ours, theirs in repeats])
            if over is not None:
                row.speedup[name] = over
            pairs = st.paired_ratios(rates[row.engine], rates[name])
            if pairs:
                row.paired[name] = [st.percentile(pairs, q) or 0.0 for q in (25, 50, 75)]


def sample_record(sample: Sample) -> dict[str, Any]:
    """What is kept of a sample in the results file: enough to make its row again."""
    answer = sample.answer
    origin = answer.started
    return {
        "engine": sample.engine,
        "prompt": sample.prompt,
        "repeat": sample.repeat,
        "set": sample.set,
        "batch": sample.batch,
        "finish": answer.finish,
        "tokens": answer.tokens,
        "arrivals": [[round(t - origin, 6), n] for t, n in answer.arrivals],
        "counters": sample.counters,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
