"""Runs the same prompts through several engines, taking turns, so that drift hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from bench.engines import Answer, Engine
from bench.figures import difference
from ssd_pipe.params import SamplingParams

WARM_UP_TOKENS = 16
Advance = Callable[[str], None]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, ready to run. ``set``: the prompt set it is from."""

    id: str
    tokens: list[int]
    params: SamplingParams
    set: str = ""


class Sample(msgspec.Struct, kw_only=True):
    """One answer of one engine.

    ``counters``: what the engine counted during it; of requests that ran together, the first one
    has what it counted during all of them.
    """

    engine: str
    prompt: str
    repeat: int
    answer: Answer
    counters: dict[str, float] = {}
    set: str = ""
    batch: int = 1

    @property
    def key(self) -> tuple[str, int]:
        """What makes samples of different engines comparable."""
        return (f"{self.set}/{self.prompt}" if self.set else self.prompt, self.repeat)


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
                    _sample(
                        engine, job, repeat, answer, difference(counted[engine.name], before), 1
                    )
                )
    return samples


def compare_batched(
    engines: Sequence[Engine], jobs: Sequence[Job], repeats: int, batch: int, advance: Advance
) -> list[Sample]:
    """Every job on every engine with ``batch`` requests under way at any time (closed loop).

    An engine has all jobs before the next one has its turn.
    """
    samples = []
    with ThreadPoolExecutor(batch) as pool:
        for repeat in range(repeats):
            first = repeat % len(engines)
            for engine in [*engines[first:], *engines[:first]]:
                advance(f"{batch} at a time: {engine.name}")
                before = engine.counters()
                answers = _together(pool, engine, jobs)
                counters = difference(engine.counters(), before)
                for job, answer in zip(jobs, answers, strict=True):
                    samples.append(_sample(engine, job, repeat, answer, counters, batch))
                    counters = {}
    return samples


def _together(pool: ThreadPoolExecutor, engine: Engine, jobs: Sequence[Job]) -> list[Answer]:
    """As many at a time as the pool has threads."""
    return list(pool.map(lambda job: engine.generate(job.tokens, job.params), jobs))


def _sample(
    engine: Engine, job: Job, repeat: int, answer: Answer, counters: dict[str, float], batch: int
) -> Sample:
    return Sample(
        engine=engine.name,
        prompt=job.id,
        repeat=repeat,
        answer=answer,
        counters=counters,
        set=job.set,
        batch=batch,
    )
