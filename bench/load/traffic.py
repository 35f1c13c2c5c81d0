"""When requests come: at a rate (Poisson), or as many at once as there are users (closed loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec
import numpy as np

from bench.load.clients import LoadClient, Sample, sleep_until
from bench.prompts import Prompt
from ssd_pipe.params import SamplingParams


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One pattern of arrivals.

    Attributes:
        concurrency: most requests under way at once; 0 = no limit.
        rate: requests a second on average, with exponential gaps; 0 = all are due at once.
        requests: how many.
    """

    concurrency: int = 0
    rate: float = 0.0
    requests: int = 0

    def __str__(self) -> str:
        parts = [f"{self.rate:g} requests/s"] if self.rate else []
        parts += [f"concurrency {self.concurrency}"] if self.concurrency else []
        return ", ".join(parts) or "all at once"

    def due(self, seed: int) -> list[float]:
        """Seconds from the start at which each request is due; the same for the same seed."""
        if not self.rate:
            return [0.0] * self.requests
        gaps = np.random.default_rng(seed).exponential(1 / self.rate, self.requests)
        gaps[0] = 0.0
        due: list[float] = np.cumsum(gaps).tolist()
        return due


async def drive(
    client: LoadClient,
    traffic: Traffic,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    seed: int = 0,
    done: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Send the traffic's requests and wait for every answer.

    Requests take ``prompts`` in turn, each with a seed of its own; ``done`` is called as they end.
    """
    limit = asyncio.Semaphore(traffic.concurrency) if traffic.concurrency else AsyncExitStack()
    started = time.monotonic()

    async def one(number: int, due: float) -> Sample:
        prompt = prompts[number % len(prompts)]
        sample = Sample(prompt=prompt.id, due=started + due, arrivals=[])
        await sleep_until(sample.due)
        async with limit:
            own = msgspec.structs.replace(params, seed=(params.seed or 0) + number)
            await client.answer(prompt, own, sample)
        done()
        return sample

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i, due)) for i, due in enumerate(traffic.due(seed))]
    return [task.result() for task in tasks]
