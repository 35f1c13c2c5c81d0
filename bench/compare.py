"""Runs the same prompts through several engines, taking turns, so that drift hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from bench.engines import Answer, Engine
from bench.figures import difference
from ssd_pipe.params import SamplingParams

WARM_UP_TOKENS = 16
Advance = Callable[[str], None]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, ready to run."""

    id: str
    tokens: list[int]
    params: SamplingParams


class Sample(msgspec.Struct, kw_only=True):
    """One answer of one engine. ``counters``: what the engine counted during it."""

    engine: str
    prompt: str
    repeat: int
    answer: Answer
    counters: dict[str, float] = {}

    @property
    def key(self) -> tuple[str, int]:
        """What makes samples of different engines comparable."""
        return (self.prompt, self.repeat)


def warm_up(engines: Sequence[Engine], job: Job) -> None:
    """One short answer from each: first-use costs, and the pipeline's first estimates."""
    params = msgspec.structs.replace(job.params, max_tokens=WARM_UP_TOKENS)
    for engine in engines:
        engine.generate(job.tokens, params)


def compare(
    engines: Sequence[Engine], jobs: Sequence[Job], repeats: int, advance: Advance
) -> list[Sample]:
    """Every job on every engine, ``repeats`` times, one request at a time.

    Engines take turns within a prompt, and the one that begins changes from prompt to prompt.
    ``advance`` is called with the engine's name before each request, never during one.
    """
    counted = {engine.name: engine.counters() for engine in engines}
    samples = []
    for repeat in range(repeats):
        for number, job in enumerate(jobs):
            first = (number + repeat) % len(engines)
            for engine in [*engines[first:], *engines[:first]]:
                advance(f"{job.id}: {engine.name}")
                answer = engine.generate(job.tokens, job.params)
                # Work that ends after the last token is counted with the next request.
                before, counted[engine.name] = counted[engine.name], engine.counters()
                samples.append(
                    Sample(
                        engine=engine.name,
                        prompt=job.id,
                        repeat=repeat,
                        answer=answer,
                        counters=difference(counted[engine.name], before),
                    )
                )
    return samples
