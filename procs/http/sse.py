"""Streams of server-sent events, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from litestar import Request
from litestar.background_tasks import BackgroundTask
from litestar.response import Stream

from procs.http.answers import Answers, Item
from procs.http.errors import CLIENT_GONE, ApiError, describe

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not collect it

T = TypeVar("T")


class Renderer(Protocol):
    """How the chunks of answers look on the wire."""

    def opening(self) -> list[msgspec.Struct]:
        """Events before the first chunk."""

    def chunk(self, item: Item) -> list[msgspec.Struct]:
        """Events of one chunk."""

    def closing(self) -> list[msgspec.Struct]:
        """Events after the last chunk."""


async def unless_gone(request: Request[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns, unless the client leaves first: then it is cancelled.

    Raises ApiError (499) for a client that has left, else whatever ``work`` raises.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(CLIENT_GONE, "the client has left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(request: Request[Any, Any, Any], answers: Answers, renderer: Renderer) -> Stream:
    """The response that streams ``answers`` and closes them, however it ends.

    It begins when the first chunk is there, so that a refusal has its own HTTP status. A
    failure after that is the last event, an error object.
    """
    try:
        first = await unless_gone(request, answers.next())
    except BaseException:
        await answers.aclose()
        raise
    return Stream(
        _events(request, first, answers, renderer),
        media_type=MEDIA_TYPE,
        headers=HEADERS,
        # A client that leaves while the server writes leaves the generator suspended.
        background=BackgroundTask(answers.aclose),
    )


async def _events(
    request: Request[Any, Any, Any], item: Item | None, answers: Answers, renderer: Renderer
) -> AsyncIterator[bytes]:
    encode = msgspec.json.Encoder().encode
    try:
        yield _joined(renderer.opening(), encode)
        while item is not None:
            if data := _joined(renderer.chunk(item), encode):
                yield data
            item = await answers.next()
        yield _joined(renderer.closing(), encode) + DONE
    except Exception as error:
        yield _joined([describe(error, request)[1]], encode)
    finally:
        await answers.aclose()


def _joined(events: list[Any], encode: Any) -> bytes:
    return b"".join(b"data: " + encode(event) + b"\n\n" for event in events)
