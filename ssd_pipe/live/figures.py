"""What happened between two looks at a pipeline's counters."""

from __future__ import annotations

from dataclasses import dataclass

from ipc.messages.client import StatusReply

STAGES = (
    ("forward pass", "forward_seconds"),
    ("judging", ""),
    ("wait for backup", "backup_wait_seconds"),
    ("wait for depth", "depth_wait_seconds"),
    ("overhead", "overhead_seconds"),
    ("draft, beside it", "draft_busy_seconds"),
)
"""Stages of a round and the counters of their seconds; judging is what verification adds to the
forward pass."""


@dataclass(frozen=True, slots=True)
class Look:
    """A status reply; ``time``: CLOCK_MONOTONIC seconds at which its counters were true."""

    reply: StatusReply
    time: float

    @classmethod
    def at(cls, reply: StatusReply, now: float) -> Look:
        """A reply received at ``now``; the scheduler may have told its counters before."""
        return cls(reply, now - max(0.0, reply.age))


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates of one span; None where there was nothing to have a rate.

    Attributes:
        seconds: length of the span; None if it began with the pipeline, which tells no time.
        output_rate, prompt_rate: tokens a second.
        accepted: draft tokens accepted, by sequence and round.
        tokens_a_round: tokens emitted by sequence and round.
        hit_rate: share of the outcomes that the speculation cache had.
        prefix_rate: share of the prompt tokens that the prefix cache had.
        step_ms: by stage, milliseconds a target step.
        rounds: (sequence, round) pairs verified.
    """

    seconds: float | None
    output_rate: float | None
    prompt_rate: float | None
    accepted: float | None
    tokens_a_round: float | None
    hit_rate: float | None
    prefix_rate: float | None
    step_ms: dict[str, float]
    rounds: int
    steps: int


def since_start(look: Look) -> Figures:
    """Over the pipeline's whole life."""
    return _figures(look.reply.counters, None)


def between(before: Look, after: Look) -> Figures:
    """Over the span between two looks at the same pipeline; empty if it has started anew."""
    old, new = before.reply.counters, after.reply.counters
    change = {name: value - old.get(name, 0.0) for name, value in new.items()}
    seconds = after.time - before.time
    if before.reply.run != after.reply.run or change.get("steps", 0) < 0 or seconds <= 0:
        return _figures({}, None)
    return _figures(change, seconds)


def kv_usage(reply: StatusReply) -> float | None:
    """Share of the target's KV blocks that requests hold."""
    total = reply.counters.get("total_blocks", 0)
    return 1 - reply.counters.get("free_blocks", 0) / total if total else None


def _figures(change: dict[str, float], seconds: float | None) -> Figures:
    def of(name: str) -> float:
        return change.get(name, 0.0)

    steps, rounds = of("steps"), of("rounds")
    times = {name: of(counter) for name, counter in STAGES if counter}
    times["judging"] = of("verify_seconds") - of("forward_seconds")
    return Figures(
        seconds=seconds,
        output_rate=of("output_tokens") / seconds if seconds else None,
        prompt_rate=of("frontend_prompt_tokens") / seconds if seconds else None,
        accepted=_ratio(of("accepted"), rounds),
        tokens_a_round=_ratio(of("accepted") + rounds, rounds),
        hit_rate=_ratio(of("hits"), of("hits") + of("misses")),
        prefix_rate=_ratio(of("prefix_hit_tokens"), of("prefix_query_tokens")),
        step_ms={name: times[name] / steps * 1e3 for name, _ in STAGES} if steps > 0 else {},
        rounds=int(rounds),
        steps=int(steps),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
