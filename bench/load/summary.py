"""Samples of one load as figures, named and defined as ``vllm bench serve`` has them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from bench.load.clients import Sample

WIDTH = 50
LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds; None without values."""

    mean: float | None = None
    median: float | None = None
    p99: float | None = None


class Summary(msgspec.Struct, kw_only=True):
    """Figures of one load. Rates are per second, ``duration`` in seconds.

    Attributes:
        ttft: from sending a request to its first piece.
        tpot: time after the first piece over the tokens after the first, one value a request.
        itl: between pieces of an answer; with speculation a piece has several tokens.
        e2el: from sending a request to the end of its answer.
        peak_concurrent: most requests under way at once.
        errors: reasons of failed requests, each once.
    """

    completed: int
    failed: int
    duration: float
    total_input: int
    total_output: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    peak_concurrent: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    errors: list[str] = []


def summarise(samples: Sequence[Sample]) -> Summary:
    """Needs at least one sample."""
    good = [s for s in samples if not s.error and s.arrivals]
    duration = max(s.ended for s in samples) - min(s.due for s in samples)
    output, given = sum(s.output_tokens for s in good), sum(s.prompt_tokens for s in good)
    gaps = [b - a for s in good for a, b in zip(s.arrivals, s.arrivals[1:], strict=False)]
    per_token = [
        (s.arrivals[-1] - s.arrivals[0]) / (s.output_tokens - 1)
        for s in good
        if s.output_tokens > 1
    ]
    return Summary(
        completed=len(good),
        failed=len(samples) - len(good),
        duration=duration,
        total_input=given,
        total_output=output,
        request_throughput=len(good) / duration,
        output_throughput=output / duration,
        total_token_throughput=(given + output) / duration,
        peak_concurrent=_peak(samples),
        ttft=_spread([s.arrivals[0] - s.sent for s in good]),
        tpot=_spread(per_token),
        itl=_spread(gaps),
        e2el=_spread([s.ended - s.sent for s in good]),
        errors=sorted({s.error or "no text came" for s in samples if s not in good}),
    )


def text(title: str, summary: Summary) -> str:
    """As ``vllm bench serve`` prints it."""
    lines = [f" {title} ".center(WIDTH, "=")]

    def add(name: str, value: float | int | None) -> None:
        shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else value
        lines.append(f"{name:<40} {shown:<10}")

    add("Successful requests:", summary.completed)
    add("Failed requests:", summary.failed)
    add("Benchmark duration (s):", summary.duration)
    add("Total input tokens:", summary.total_input)
    add("Total generated tokens:", summary.total_output)
    add("Request throughput (req/s):", summary.request_throughput)
    add("Output token throughput (tok/s):", summary.output_throughput)
    add("Total Token throughput (tok/s):", summary.total_token_throughput)
    add("Peak concurrent requests:", summary.peak_concurrent)
    for name, heading in LATENCIES.items():
        lines.append(heading.center(WIDTH, "-"))
        spread = getattr(summary, name)
        for statistic in ("mean", "median", "p99"):
            add(f"{statistic.capitalize()} {name.upper()} (ms):", getattr(spread, statistic))
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def _spread(seconds: Sequence[float]) -> Spread:
    if not seconds:
        return Spread()
    values = np.asarray(seconds) * 1e3
    return Spread(
        mean=float(values.mean()),
        median=float(np.median(values)),
        p99=float(np.percentile(values, 99)),
    )


def _peak(samples: Sequence[Sample]) -> int:
    moves = [(s.sent, 1) for s in samples] + [(s.ended, -1) for s in samples]
    running = peak = 0
    for _, change in sorted(moves):
        running += change
        peak = max(peak, running)
    return peak
