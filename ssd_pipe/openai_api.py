"""The API of OpenAI-compatible servers: where it is, its errors, and the events of an answer.

What all our clients of such servers have in common. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import httpx
import msgspec
from httpx_sse import EventSource

from ssd_pipe.errors import ConfigError, PeerLost, RequestError

CONNECT_TIMEOUT, READ_TIMEOUT = 5.0, 300.0  # seconds; a long prompt makes the first token late
UNLIMITED = httpx.Limits(max_connections=None)
DONE = "[DONE]"
LONGEST = 300  # characters of what a server says that is no error object


class Said(msgspec.Struct):
    """What a chat's event adds to a message. ``reasoning`` is newer vLLM's and Ollama's name."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """What an event adds to one answer: ``delta`` in chats, ``text`` in completions."""

    index: int | None = None
    delta: Said | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class Usage(msgspec.Struct):
    """Tokens; of all answers to a request together."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Event(msgspec.Struct):
    """What is read of an event; whatever else a server says in it is passed over."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class _Offered(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Offered]


def api_url(url: str, option: str = "--url") -> str:
    """Where the API of the server at ``url`` is: that, or its ``/v1`` if it names no path.

    Raises ConfigError, naming ``option``, for a url that is none.
    """
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL()
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ConfigError(option, f"must look like http://HOST:PORT/v1, got {url!r}")
    if parts.path in ("", "/"):
        parts = parts.copy_with(path="/v1")
    return str(parts).rstrip("/")


def authorization(key: str) -> dict[str, str]:
    """The headers of a bearer token; none if it is empty. Raises ConfigError for one that no header
    can hold."""
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("API key", "must be printable ASCII characters")
    return {"Authorization": f"Bearer {key}"} if key else {}


def first_model(response: httpx.Response) -> str:
    """The first model a server lists, by its answer. Raises PeerLost if it is no such list."""
    try:
        return msgspec.json.decode(response.content, type=_Models).data[0].id
    except (msgspec.DecodeError, LookupError):
        raise PeerLost(f"{response.url}: lists no model") from None


def lost(url: httpx.URL | str, error: Exception) -> PeerLost:
    """The error for what httpx could not do."""
    return PeerLost(f"{url}: {str(error) or type(error).__name__}")


def refusal(response: httpx.Response) -> RequestError:
    """The error for a response that was refused and has been read, in the server's own words."""
    try:
        told = response.json()
    except ValueError:
        text = response.text.strip()
        told = "" if text.startswith("<") else text[:LONGEST]  # no page for browsers
    error = told.get("error") if isinstance(told, dict) else None
    return _error(response.status_code, error or told or response.reason_phrase)


def events(response: httpx.Response, answers: int = 1) -> Iterator[Event]:
    """Events of a streamed response with so many answers, until the server says it is done.

    Raises RequestError for an error among them, PeerLost if they break off or cannot be read.
    """
    reading = _Reading(response, answers)
    with _readable(response):
        for event in EventSource(response).iter_sse():
            if event.data == DONE:
                return
            if event.data:
                yield reading.take(event.data)
    reading.end()


async def async_events(response: httpx.Response, answers: int = 1) -> AsyncIterator[Event]:
    """``events`` of an asynchronous client's response."""
    reading = _Reading(response, answers)
    with _readable(response):
        async for event in EventSource(response).aiter_sse():
            if event.data == DONE:
                return
            if event.data:
                yield reading.take(event.data)
    reading.end()


class OpenAIApi:
    """A connection to one server and one of its models. A context manager.

    Args:
        url: of the server, with or without the ``/v1``.
        model: as the server calls it; empty for the first one it lists, see ``find_model``.
        api_key: bearer token; empty for none.

    Raises ConfigError for a url that is none.
    """

    def __init__(self, url: str, model: str = "", api_key: str = "") -> None:
        self.url = api_url(url)
        self.model = model
        self.http = httpx.Client(
            headers=authorization(api_key),
            timeout=httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT),
            limits=UNLIMITED,
        )

    def find_model(self) -> str:
        """The model's name. Raises PeerLost or RequestError if the server does not tell it."""
        if not self.model:
            self.model = first_model(self._send("GET", "models"))
        return self.model

    def ask(self, route: str, body: dict[str, Any]) -> httpx.Response:
        """The response to a request, for ``events``; close it.

        Raises RequestError if it is refused, or if its text is not Unicode (surrogates); PeerLost
        if nobody answers.
        """
        told = {"model": self.find_model(), "stream": True, **body}
        try:
            return self._send("POST", route, told, stream=True)
        except UnicodeEncodeError:
            raise RequestError(400, "the text is not valid Unicode") from None

    def close(self) -> None:
        """Disconnect; idempotent."""
        self.http.close()

    def __enter__(self) -> OpenAIApi:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _send(
        self, method: str, route: str, body: dict[str, Any] | None = None, stream: bool = False
    ) -> httpx.Response:
        request = self.http.build_request(method, f"{self.url}/{route}", json=body)
        try:
            response = self.http.send(request, stream=stream)
            if response.is_error:
                response.read()
        except httpx.HTTPError as error:
            raise lost(self.url, error) from None
        if response.is_error:
            raise refusal(response)
        return response


_DECODER = msgspec.json.Decoder(Event)


class _Reading:
    """Decodes a response's events, and knows which of its answers have not ended."""

    def __init__(self, response: httpx.Response, answers: int) -> None:
        self._url = response.url
        self._open = set(range(answers))

    def take(self, data: str) -> Event:
        event = _DECODER.decode(data)
        if event.error:
            raise _error(503, event.error)
        self._open -= {c.index or 0 for c in event.choices or () if c.finish_reason}
        return event

    def end(self) -> None:
        """Of a response without a ``DONE``."""
        if self._open:
            raise PeerLost(f"{self._url}: the answer broke off")


@contextmanager
def _readable(response: httpx.Response) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise lost(f"{response.url}: the answer broke off", error) from None
    except msgspec.DecodeError as error:
        raise PeerLost(f"{response.url}: unreadable answer: {error}") from None


def _error(status: int, told: Any) -> RequestError:
    """``told``: an error object, or words."""
    message = told.get("message") if isinstance(told, dict) else told
    words = message if message and isinstance(message, str) else json.dumps(told)[:LONGEST]
    return RequestError(status, f"the server answered: {words}")
