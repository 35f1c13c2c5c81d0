"""Histograms of the requests that came through this gateway, under vLLM's names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from ipc.messages.client import RequestMetrics

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers its engines; a pipeline is one

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
_TOKEN_TIMES = (0.00025, 0.0005, *_FAST, 2.5, 5.0)
_FIRST_TIMES = (*_FAST, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0)
_REQUEST_TIMES = (*_SECONDS, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKEN_COUNTS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class RequestHistograms:
    """Attributes: ``registry`` holds them, for exposition."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._names = (model_name, ENGINE)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(
                f"vllm:{name}",
                f"{text}, of requests through this gateway.",
                LABELS,
                registry=self.registry,
                buckets=buckets,
            )
            return made.labels(*self._names)

        self._first = histogram("time_to_first_token_seconds", "Time to first token", _FIRST_TIMES)
        self._inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between tokens (those of one round share its time)",
            _TOKEN_TIMES,
        )
        self._total = histogram(
            "e2e_request_latency_seconds", "Time from arrival to end", _REQUEST_TIMES
        )
        self._queue = histogram("request_queue_time_seconds", "Time in the queue", _REQUEST_TIMES)
        self._prefill = histogram(
            "request_prefill_time_seconds", "Time from queue to first token", _REQUEST_TIMES
        )
        self._decode = histogram(
            "request_decode_time_seconds", "Time from first token to end", _REQUEST_TIMES
        )
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens", _TOKEN_COUNTS)
        self._output = histogram("request_generation_tokens", "Output tokens", _TOKEN_COUNTS)
        self._success = Counter(
            "vllm:request_success",
            "Requests through this gateway that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*self._names, reason)

    def tokens(self, count: int, seconds: float) -> None:
        """``count`` tokens have come at once, ``seconds`` after those before them."""
        for _ in range(count):
            self._inter_token.observe(seconds / count)

    def finished(self, metrics: RequestMetrics, reason: str) -> None:
        """An answer is complete."""
        queue, first, total = metrics.queue_time, metrics.time_to_first_token, metrics.total_time
        self._first.observe(first)
        self._total.observe(total)
        self._queue.observe(queue)
        self._prefill.observe(max(0.0, first - queue))
        self._decode.observe(max(0.0, total - first))
        self._prompt.observe(metrics.prompt_tokens)
        self._output.observe(metrics.output_tokens)
        self._success.labels(*self._names, reason).inc()

    def unfinished(self, reason: str) -> None:
        """An answer ended early: "abort" (the client left) or "error"."""
        self._success.labels(*self._names, reason).inc()
