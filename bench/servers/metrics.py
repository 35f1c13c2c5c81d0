"""Counters of speculation out of a server's ``/metrics``, under the names that our pipeline uses.

vLLM's names (``vllm:spec_decode_*``), which our gateway has too, and our gateway's own.
"""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

TOTALS = {
    "vllm:spec_decode_num_drafts_total": "rounds",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "ssd_pipe:speculation_cache_hits_total": "hits",
    "ssd_pipe:speculation_cache_misses_total": "misses",
    "ssd_pipe:steps_total": "steps",
}
BY_LABEL = {
    "ssd_pipe:speculation_cache_hits_by_length_total": ("hits_at", "accepted"),
    "ssd_pipe:speculation_cache_misses_by_length_total": ("misses_at", "accepted"),
    "ssd_pipe:round_seconds_total": ("", "stage"),
    "ssd_pipe:draft_wait_seconds_total": ("", "cause"),
}
SECONDS = {
    "verify": "verify_seconds",
    "forward": "forward_seconds",
    "draft": "draft_busy_seconds",
    "backup": "backup_wait_seconds",
    "depth": "depth_wait_seconds",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def counters(text: str) -> dict[str, float]:
    """Totals since the server's start, over all its engines; empty for a page without any."""
    found: dict[str, float] = {}
    reached: dict[int, float] = {}

    def add(name: str, value: float) -> None:
        found[name] = found.get(name, 0.0) + value

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in TOTALS:
                add(TOTALS[sample.name], sample.value)
            elif sample.name == PER_POSITION:
                position = int(sample.labels["position"])
                reached[position] = reached.get(position, 0.0) + sample.value
            elif sample.name in BY_LABEL:
                prefix, label = BY_LABEL[sample.name]
                value = sample.labels[label]
                name = f"{prefix}_{value}" if prefix else SECONDS.get(value, "")
                if name:
                    add(name, sample.value)
    if reached and "rounds" in found:
        _add_positions(found, [found["rounds"], *(reached[i] for i in sorted(reached))])
    return found


def _add_positions(found: dict[str, float], reached: list[float]) -> None:
    """``reached[j]``: rounds that accepted at least j tokens; chains are taken to be full."""
    for j, count in enumerate(reached):
        beyond = reached[j + 1] if j + 1 < len(reached) else 0.0
        found[f"accepted_at_{j}"] = count - beyond
        found[f"judged_at_{j}"] = count if j + 1 < len(reached) else 0.0
