"""A batch of requests at once, and the rate while all of them decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from ssd_pipe.async_client import AsyncClient
from ssd_pipe.params import SamplingParams

SILENCE = 120.0  # seconds without an answer after which a wave has failed


class Wave(msgspec.Struct, kw_only=True):
    """Requests that ran together. Times are CLOCK_MONOTONIC seconds.

    Attributes:
        arrivals: per request, (time, tokens) of each piece.
    """

    arrivals: list[list[tuple[float, int]]]

    @property
    def window(self) -> tuple[float, float]:
        """From the moment the last request got its first piece until the first one had its last."""
        begin = max(pieces[0][0] for pieces in self.arrivals)
        return begin, max(begin, min(pieces[-1][0] for pieces in self.arrivals))

    @property
    def tokens(self) -> int:
        """That came within the window, after its beginning."""
        begin, end = self.window
        return sum(n for pieces in self.arrivals for at, n in pieces if begin < at <= end)

    @property
    def seconds(self) -> float:
        begin, end = self.window
        return end - begin


def rate(waves: Sequence[Wave]) -> float | None:
    """Tokens a second of all rows together; None if no wave had all its rows decoding at once."""
    seconds = sum(wave.seconds for wave in waves)
    return sum(wave.tokens for wave in waves) / seconds if seconds > 0 else None


def run_wave(endpoint: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Wave:
    """Submit all ``prompts`` together and follow them to their end. Raises SsdPipeError."""
    return asyncio.run(_wave(endpoint, prompts, max_tokens))


async def _wave(endpoint: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Wave:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    async with AsyncClient(endpoint, timeout=SILENCE) as client:

        async def follow(prompt: Sequence[int]) -> list[tuple[float, int]]:
            pieces = []
            async with client.stream(token_ids=prompt, params=params) as stream:
                async for chunk in stream:
                    if chunk.token_ids:
                        pieces.append((time.monotonic(), len(chunk.token_ids)))
            return pieces

        return Wave(arrivals=list(await asyncio.gather(*map(follow, prompts))))
