"""Who answers the requests: a pipeline over ZeroMQ, or an OpenAI-compatible server over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Protocol

import httpx
import msgspec

from bench.prompts import Prompt
from ssd_pipe.async_client import AsyncClient
from ssd_pipe.errors import SsdPipeError
from ssd_pipe.openai_api import (
    UNLIMITED,
    Event,
    api_url,
    async_events,
    authorization,
    first_model,
    lost,
    refusal,
)
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
    """Any OpenAI-compatible server at ``url``; ``model`` empty = the first it lists.

    Raises ConfigError for a url that is none, PeerLost or RequestError on entering if the server
    does not tell its models.
    """

    def __init__(self, url: str, model: str = "", api_key: str = "") -> None:
        self.url = api_url(url)
        self.model = model
        self._http = httpx.AsyncClient(
            headers=authorization(api_key), timeout=None, limits=UNLIMITED
        )

    async def __aenter__(self) -> OpenAIClient:
        try:
            if not self.model:
                self.model = first_model(await self._send("GET", "models"))
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def answer(self, prompt: Prompt, params: SamplingParams, sample: Sample) -> None:
        """See LoadClient."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if params.ignore_eos:
            body["ignore_eos"] = True
        if prompt.text:
            route, body["prompt"] = "completions", prompt.text
        else:
            route, body["messages"] = "chat/completions", messages(prompt)
        sample.sent = time.monotonic()
        try:
            response = await self._send("POST", route, body)
            async with aclosing(response):
                async for event in async_events(response):
                    self._take(event, sample)
        except SsdPipeError as error:
            sample.error = str(error)
        sample.ended = time.monotonic()

    async def _send(
        self, method: str, route: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        """The response to a request, read if there is no body."""
        request = self._http.build_request(method, f"{self.url}/{route}", json=body)
        try:
            response = await self._http.send(request, stream=body is not None)
            if response.is_error:
                await response.aread()
        except httpx.HTTPError as error:
            raise lost(self.url, error) from None
        if response.is_error:
            raise refusal(response)
        return response

    @staticmethod
    def _take(event: Event, sample: Sample) -> None:
        if event.usage is not None:
            sample.prompt_tokens = event.usage.prompt_tokens or 0
            sample.output_tokens = event.usage.completion_tokens or 0
        for choice in event.choices or ():
            if choice.text if choice.delta is None else choice.delta.content:
                sample.arrivals.append(time.monotonic())
            sample.finish = choice.finish_reason or sample.finish


def messages(prompt: Prompt) -> list[dict[str, str]]:
    """A conversation as the APIs take it."""
    return [{"role": ROLES[i % 2], "content": text} for i, text in enumerate(prompt.messages)]


async def sleep_until(due: float) -> None:
    """``due``: CLOCK_MONOTONIC seconds."""
    await asyncio.sleep(max(0.0, due - time.monotonic()))
