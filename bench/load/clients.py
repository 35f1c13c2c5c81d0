"""Who answers the requests: a pipeline over ZeroMQ, or an OpenAI-compatible server over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from bench.prompts import Prompt
from ssd_pipe.async_client import AsyncClient
from ssd_pipe.errors import ResourceError, SsdPipeError
from ssd_pipe.params import SamplingParams

ROLES = ("user", "assistant")
SILENCE = 120.0  # seconds after which a pipeline counts as gone


class Sample(msgspec.Struct, kw_only=True):
    """One request as its client saw it.

    Attributes:
        prompt: id of its prompt.
        due: when it was to be sent, CLOCK_MONOTONIC seconds like all times here.
        sent: when it was.
        arrivals: when each piece with text or tokens came.
        ended: when the answer was complete.
        error: why there is none; empty if there is.
    """

    prompt: str
    due: float
    sent: float = 0.0
    arrivals: list[float] = []
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish: str = ""
    error: str = ""


class LoadClient(Protocol):
    """Sends requests to one server; an asynchronous context manager."""

    async def __aenter__(self) -> LoadClient: ...

    async def __aexit__(self, *exception: object) -> None: ...

    async def answer(self, prompt: Prompt, params: SamplingParams, sample: Sample) -> None:
        """Send a request and fill ``sample`` while its answer streams in. A failure goes into
        ``sample.error``."""


class PipelineClient:
    """Our own protocol, at ``endpoint``. ``encode`` gives the token ids to send; None sends text,
    which a chat template is needed for."""

    def __init__(self, endpoint: str, encode: Callable[[Prompt], list[int]] | None = None) -> None:
        self._client = AsyncClient(endpoint, timeout=SILENCE)
        self._encode = encode

    async def __aenter__(self) -> PipelineClient:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.close()

    async def answer(self, prompt: Prompt, params: SamplingParams, sample: Sample) -> None:
        """See LoadClient."""
        given: dict[str, Any] = {"messages": messages(prompt)}
        if self._encode is not None:
            given = {"token_ids": self._encode(prompt)}
        elif prompt.text:
            given = {"prompt": prompt.text}
        sample.sent = time.monotonic()
        try:
            async with self._client.stream(params=params, **given) as stream:
                async for chunk in stream:
                    if chunk.token_ids:
                        sample.arrivals.append(time.monotonic())
                    if chunk.finish_reason is not None:
                        sample.finish = chunk.finish_reason
                        if chunk.metrics is not None:
                            sample.prompt_tokens = chunk.metrics.prompt_tokens
                            sample.output_tokens = chunk.metrics.output_tokens
        except SsdPipeError as error:
            sample.error = str(error)
        sample.ended = time.monotonic()


class OpenAIClient:
    """Any OpenAI-compatible server at ``url``; ``model`` empty = the first it offers.

    Raises ResourceError if the openai package is not installed, or there is no server.
    """

    def __init__(self, url: str, model: str = "", api_key: str = "") -> None:
        try:
            self._openai: Any = importlib.import_module("openai")
        except ModuleNotFoundError:
            needed = "--url needs the openai package: pip install 'ssd-pipe[load]'"
            raise ResourceError(needed) from None
        base = url.rstrip("/")
        self._url = base if base.endswith("/v1") else f"{base}/v1"
        self._key = api_key or "none"
        self.model = model

    async def __aenter__(self) -> OpenAIClient:
        self._api = self._openai.AsyncOpenAI(
            base_url=self._url, api_key=self._key, max_retries=0, timeout=None
        )
        if not self.model:
            try:
                offered = await self._api.models.list()
            except self._openai.OpenAIError as error:
                await self._api.close()
                raise ResourceError(f"{self._url}: {error}") from None
            if not offered.data:
                raise ResourceError(f"{self._url} offers no model; name one: --model")
            self.model = offered.data[0].id
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._api.close()

    async def answer(self, prompt: Prompt, params: SamplingParams, sample: Sample) -> None:
        """See LoadClient."""
        request: dict[str, Any] = {
            "model": self.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if params.ignore_eos:
            request["extra_body"] = {"ignore_eos": True}
        sample.sent = time.monotonic()
        try:
            if prompt.text:
                stream = await self._api.completions.create(prompt=prompt.text, **request)
            else:
                stream = await self._api.chat.completions.create(
                    messages=messages(prompt), **request
                )
            async with stream:
                async for chunk in stream:
                    self._take(chunk, sample)
        except self._openai.OpenAIError as error:
            sample.error = str(error) or type(error).__name__
        sample.ended = time.monotonic()

    @staticmethod
    def _take(chunk: Any, sample: Sample) -> None:
        if chunk.usage is not None:
            sample.prompt_tokens = chunk.usage.prompt_tokens
            sample.output_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            if choice.text if delta is None else delta.content:
                sample.arrivals.append(time.monotonic())
            sample.finish = choice.finish_reason or sample.finish


def messages(prompt: Prompt) -> list[dict[str, str]]:
    """A conversation as the APIs take it."""
    return [{"role": ROLES[i % 2], "content": text} for i, text in enumerate(prompt.messages)]


async def sleep_until(due: float) -> None:
    """``due``: CLOCK_MONOTONIC seconds."""
    await asyncio.sleep(max(0.0, due - time.monotonic()))
