"""The pipeline's own gauges and counters at scrape time: vLLM's names where it has one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ipc.messages.client import StatusReply
from procs.http.request_metrics import ENGINE, LABELS, RequestHistograms

Values = dict[str, float]
Labelled = tuple[str, str, dict[str, str]]  # label, help, value of the label -> counter

GAUGES = {
    "vllm:num_requests_running": ("running", "Requests that are running."),
    "vllm:num_requests_waiting": ("waiting", "Requests that wait to be admitted."),
    "ssd_pipe:free_blocks": ("free_blocks", "Free KV blocks of the target."),
    "ssd_pipe:draft_free_blocks": ("draft_free_blocks", "Free KV blocks of the draft."),
    "ssd_pipe:open_requests": ("frontend_open_requests", "Requests the frontend holds."),
    "ssd_pipe:degraded": ("degraded", "1 while the pipeline serves without its draft."),
}
COUNTERS = {
    "vllm:prefix_cache_queries": ("prefix_query_tokens", "Prompt tokens looked up."),
    "vllm:prefix_cache_hits": ("prefix_hit_tokens", "Prompt tokens found."),
    "vllm:prompt_tokens": ("frontend_prompt_tokens", "Prompt tokens of accepted requests."),
    "vllm:generation_tokens": ("output_tokens", "Tokens generated."),
    "vllm:num_preemptions": ("preemptions", "Requests sent back to the queue."),
    "vllm:spec_decode_num_drafts": ("rounds", "Rounds: verifications of one chain."),
    "vllm:spec_decode_num_draft_tokens": ("drafted", "Draft tokens verified."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted", "Draft tokens accepted."),
    "ssd_pipe:speculation_cache_hits": ("hits", "Outcomes that were cached."),
    "ssd_pipe:speculation_cache_misses": ("misses", "Outcomes that were not cached."),
    "ssd_pipe:draft_losses": ("draft_losses", "Times the draft died or did not answer."),
    "ssd_pipe:timed_out_requests": ("frontend_timed_out", "Requests that ran out of time."),
    "ssd_pipe:steps": ("steps", "Forward passes of the target."),
    "ssd_pipe:tokens_fed": ("tokens_fed", "Tokens fed to the target."),
    "ssd_pipe:bad_messages": ("frontend_bad_messages", "Messages of clients that are none."),
    "ssd_pipe:failed_handshakes": (
        "frontend_failed_handshakes",
        "Connections that did not speak the protocol or had no right key.",
    ),
    "ssd_pipe:hub_bad_messages": ("hub_bad_messages", "Messages between processes that are none."),
    "ssd_pipe:rejected_requests": ("frontend_rejected", "Requests that were refused."),
    "ssd_pipe:lost_clients": ("frontend_lost_clients", "Clients that left with open requests."),
}
LABELLED: dict[str, Labelled] = {
    "ssd_pipe:backups": (
        "kind",
        "Chains made after a miss, by what made them.",
        {"jit": "backup_jit", "ngram": "backup_ngram", "none": "backup_none"},
    ),
    "ssd_pipe:draft_wait_seconds": (
        "cause",
        "Time the target waited for the draft.",
        {"backup": "backup_wait_seconds", "depth": "depth_wait_seconds"},
    ),
    "ssd_pipe:round_seconds": (
        "stage",
        "Time of rounds by stage; verify holds forward, draft runs beside it.",
        {
            "verify": "verify_seconds",
            "forward": "forward_seconds",
            "overhead": "overhead_seconds",
            "draft": "draft_busy_seconds",
        },
    ),
}
BY_LENGTH = {
    "ssd_pipe:accepted_length": ("accepted_at_", "Rounds by accepted length."),
    "ssd_pipe:speculation_cache_hits_by_length": ("hits_at_", "Hits by accepted length."),
    "ssd_pipe:speculation_cache_misses_by_length": ("misses_at_", "Misses by accepted length."),
}


class PipelineCollector(Collector):
    """The metrics of one StatusReply; without one, only that the pipeline does not answer."""

    def __init__(self, reply: StatusReply | None, model_name: str) -> None:
        self._reply = reply
        self._names = (model_name, ENGINE)

    def collect(self) -> Iterator[Metric]:
        """Counters of a mode that has no draft are left out."""
        up = GaugeMetricFamily("ssd_pipe:up", "Whether the pipeline answers.", labels=LABELS)
        up.add_metric(self._names, float(self._reply is not None))
        yield up
        if self._reply is None:
            return
        values = self._reply.counters
        yield from self._gauges(values)
        yield from self._counters(values)

    def _gauges(self, values: Values) -> Iterator[Metric]:
        for name, (source, text) in GAUGES.items():
            if source in values:
                yield self._gauge(name, text, values[source])
        if total := values.get("total_blocks"):
            used = 1 - values["free_blocks"] / total
            text = "Share of the target's KV blocks in use."
            for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
                yield self._gauge(name, text, used)

    def _counters(self, values: Values) -> Iterator[Metric]:
        for name, (source, text) in COUNTERS.items():
            if source in values:
                yield self._counter(name, text, "", [("", values[source])])
        for name, (label, text, sources) in LABELLED.items():
            found: list[tuple[str, float]] = [
                (value, values[key]) for value, key in sources.items() if key in values
            ]
            if found:
                yield self._counter(name, text, label, found)
        for name, (prefix, text) in BY_LENGTH.items():
            if by_length := numbered(values, prefix):
                rows = [(str(k), count) for k, count in enumerate(by_length)]
                yield self._counter(name, text, "accepted", rows)
        if by_length := numbered(values, "accepted_at_"):
            rows = [(str(i), sum(by_length[i + 1 :])) for i in range(len(by_length) - 1)]
            text = "Draft tokens accepted, by position in the chain."
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            yield self._counter(name, text, "position", rows)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._names, value)
        return family

    def _counter(
        self, name: str, text: str, label: str, rows: Iterable[tuple[str, float]]
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label) if label else LABELS)
        for value, count in rows:
            family.add_metric((*self._names, value) if label else self._names, count)
        return family


def numbered(values: Values, prefix: str) -> list[float]:
    """``prefix0``, ``prefix1``, ... as far as they go."""
    found: list[float] = []
    while (key := f"{prefix}{len(found)}") in values:
        found.append(values[key])
    return found


def exposition(reply: StatusReply | None, histograms: RequestHistograms, model_name: str) -> bytes:
    """Everything in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(PipelineCollector(reply, model_name))
    return generate_latest(registry) + generate_latest(histograms.registry)
