"""The answers to one HTTP request, whose number is prompts times n, as one stream of chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ipc.messages.client import Chunk, RequestMetrics, TokenLogprob
from procs.http.parse import Prompt
from procs.http.request_metrics import RequestHistograms
from ssd_pipe.async_client import AsyncClient
from ssd_pipe.async_stream import AsyncStream
from ssd_pipe.errors import RequestError, SsdPipeError
from ssd_pipe.params import SamplingParams

Item: TypeAlias = tuple[int, Chunk]


@dataclass(slots=True)
class Answer:
    """One answer, as far as it has come; the last two are its first chunk's."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    metrics: RequestMetrics | None = None
    thinking: bool | None = None
    prompt_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Answers:
    """Submits at once. With n = ``params.n``, answer ``p * n + i`` is the i-th one to prompt p.

    Args:
        client: connection to the pipeline.
        prompts: what to answer.
        params: of all.
        must_fit: refuse ``max_tokens`` that do not fit beside a prompt.
        timeout: seconds until ``next`` fails with 504; 0 = never.
        histograms: where requests are observed.

    Attributes:
        answers: what has come so far.

    To be closed, which cancels what is still going on. Raises RequestError (413) for a prompt
    that no message holds.
    """

    def __init__(
        self,
        client: AsyncClient,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        must_fit: bool,
        timeout: float,
        histograms: RequestHistograms,
    ) -> None:
        self.answers = [Answer() for _ in range(params.n * len(prompts))]
        self._n = params.n
        self._open = set(range(len(self.answers)))
        self._failed = False
        self._histograms = histograms
        self._deadline = asyncio.get_running_loop().time() + timeout if timeout else None
        self._last_time = [0.0] * len(self.answers)
        self._items: asyncio.Queue[tuple[int, Chunk | SsdPipeError]] = asyncio.Queue()
        # They cancel themselves when they are dropped, should a prompt below not fit.
        self._streams = [
            client.stream(
                prompt.text,
                params,
                messages=prompt.messages,
                token_ids=prompt.token_ids,
                chat_template_kwargs=prompt.template_kwargs,
                add_generation_prompt=prompt.generation_prompt,
                continue_final_message=prompt.continued,
                must_fit=must_fit,
            )
            for prompt in prompts
        ]
        self._tasks = [
            asyncio.create_task(self._pump(p * params.n, stream))
            for p, stream in enumerate(self._streams)
        ]

    async def next(self) -> Item | None:
        """The next chunk of any answer; None when all are complete.

        Raises RequestError or PeerLost if one of them fails, RequestError (504) when time is up.
        """
        if not self._open:
            return None
        try:
            async with asyncio.timeout_at(self._deadline):
                index, item = await self._items.get()
        except TimeoutError:
            self._failed = True
            raise RequestError(504, "the request has run out of time") from None
        if isinstance(item, SsdPipeError):
            self._failed = True
            raise item
        if item.finish_reason == "cancelled":
            raise RequestError(499, "the request was cancelled")
        self._take(index, item)
        return index, item

    async def rest(self) -> list[Answer]:
        """All answers, when they are complete. Raises as ``next``."""
        while await self.next() is not None:
            pass
        return self.answers

    async def aclose(self) -> None:
        """Cancel what is not complete. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            await stream.aclose()
        for _ in self._open:
            self._histograms.unfinished("error" if self._failed else "abort")
        self._open.clear()

    def prompt_tokens(self) -> tuple[int, int]:
        """Tokens of all prompts, and how many of them the prefix cache had."""
        metrics = [a.metrics for a in self.answers[:: self._n] if a.metrics is not None]
        return (
            sum(m.prompt_tokens for m in metrics),
            sum(m.cached_prompt_tokens for m in metrics),
        )

    def prompt_tokens_of(self, index: int) -> int:
        """Tokens of the prompt of one answer; 0 before any answer to it has begun."""
        first = index - index % self._n
        return max(answer.prompt_tokens for answer in self.answers[first : first + self._n])

    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(a.metrics.output_tokens for a in self.answers if a.metrics is not None)

    async def _pump(self, first: int, stream: AsyncStream) -> None:
        try:
            async for chunk in stream:
                self._items.put_nowait((first + chunk.index, chunk))
        except SsdPipeError as error:
            self._items.put_nowait((first, error))

    def _take(self, index: int, chunk: Chunk) -> None:
        answer, now = (
            self.answers[index],
            time.monotonic(),
        )  # uvloop's own clock counts milliseconds
        if chunk.token_ids:
            if last := self._last_time[index]:
                self._histograms.tokens(len(chunk.token_ids), now - last)
            self._last_time[index] = now
        if chunk.thinking is not None:
            answer.thinking = chunk.thinking
        answer.prompt_tokens = chunk.prompt_tokens or answer.prompt_tokens
        answer.texts.append(chunk.text)
        answer.token_ids += chunk.token_ids
        answer.logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            answer.finish_reason, answer.metrics = chunk.finish_reason, chunk.metrics
            self._open.discard(index)
            if chunk.metrics is not None:
                self._histograms.finished(chunk.metrics, chunk.finish_reason)
