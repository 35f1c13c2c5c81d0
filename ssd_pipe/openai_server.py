"""Chat with any OpenAI-compatible server, in the shape of ``client.Client``. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import httpx
import msgspec

from ipc.messages.client import ChatMessage, Chunk, RequestMetrics
from ssd_pipe.errors import ConfigError, PeerLost, RequestError
from ssd_pipe.params import SamplingParams

CONNECT_TIMEOUT, READ_TIMEOUT = 5.0, 300.0  # seconds; a long prompt makes the first token late
_PLAIN = ("temperature", "top_p")
_IF_SET = (
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "timeout",
)
"""Sent only where they differ from the default: OpenAI's own server refuses most of them."""
_DEFAULTS = SamplingParams()


class OpenAIServer:
    """One server and one of its models. A context manager.

    Args:
        url: of the server, with or without the ``/v1``.
        model: as the server calls it; empty for the first one it lists.
        api_key: bearer token; empty for none.
        limited: send ``max_tokens``; else the server's own limit counts.

    Raises ConfigError for a url that is none, PeerLost if nobody answers, RequestError if the
    server refuses to list its models.
    """

    def __init__(self, url: str, model: str = "", api_key: str = "", limited: bool = True) -> None:
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL:
            parts = httpx.URL()
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigError("--url", f"must look like http://HOST:PORT/v1, got {url!r}")
        if parts.path in ("", "/"):
            parts = parts.copy_with(path="/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = str(parts).rstrip("/")
        self._plain = (*_PLAIN, "max_tokens") if limited else _PLAIN
        self._http = httpx.Client(
            headers=headers, timeout=httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
        )
        self.model = model
        try:
            self.model = model or self._first_model()
        except BaseException:
            self.close()
            raise

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> ServerStream:
        """Stream the answer to a conversation; what is refused raises RequestError here."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {name: getattr(params, name) for name in self._plain}
        for name in _IF_SET:
            if getattr(params, name) != getattr(_DEFAULTS, name):
                body[name] = getattr(params, name)
        if chat_template_kwargs is not None:
            body["chat_template_kwargs"] = chat_template_kwargs
        if params.stop:
            body["stop"] = list(params.stop)
        asked = time.monotonic()
        request = self._http.build_request("POST", f"{self.url}/chat/completions", json=body)
        return ServerStream(self._send(request, stream=True), asked)

    def close(self) -> None:
        """Disconnect; idempotent."""
        self._http.close()

    def __enter__(self) -> OpenAIServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _first_model(self) -> str:
        reply = self._send(self._http.build_request("GET", f"{self.url}/models"))
        try:
            return str(reply.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise PeerLost(f"{self.url}/models: not an OpenAI-compatible server") from None

    def _send(self, request: httpx.Request, stream: bool = False) -> httpx.Response:
        try:
            response = self._http.send(request, stream=stream)
            if response.is_error:
                response.read()
        except httpx.HTTPError as error:
            raise PeerLost(f"{self.url}: {error or type(error).__name__}") from None
        if response.is_error:
            try:
                told = response.json()
            except ValueError:
                told = None
            raise _refusal(told, response.status_code, response.reason_phrase)
        return response


class ServerStream:
    """Chunks of one answer; iterating raises RequestError or PeerLost if it breaks off.

    The last chunk has metrics if the server told how many tokens there were. They are measured
    here, the network included; hits and acceptance are not known.
    """

    def __init__(self, response: httpx.Response, asked: float) -> None:
        self._response = response
        self._lines = _lines(response)
        self._asked = asked
        self._first = self._last = 0.0
        self._usage: dict[str, int] = {}
        self._finish = ""
        self._done = False
        self._cancelled = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._done:
            raise StopIteration
        while not self._cancelled:
            event = self._event()
            if event is None:
                return self._end(self._finish or "stop")
            if "error" in event:
                self._close()
                raise _refusal(event, 503, "the answer broke off")
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices") or ():
                self._finish = choice.get("finish_reason") or self._finish
                text = (choice.get("delta") or {}).get("content")
                if text:
                    self._last = time.monotonic()
                    self._first = self._first or self._last
                    return Chunk(id="", text=text)
        return self._end("cancelled")

    def cancel(self) -> None:
        """End the answer; the next chunk is the last and says "cancelled"."""
        self._cancelled = True

    def _event(self) -> dict[str, Any] | None:
        """The next server-sent event's object, None at the end."""
        try:
            for line in self._lines:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return None
                return msgspec.json.decode(data, type=dict[str, Any])
        except httpx.HTTPError as error:
            self._close()
            raise PeerLost(f"{self._response.url}: the answer broke off: {error}") from None
        except msgspec.DecodeError as error:
            self._close()
            raise PeerLost(f"{self._response.url}: unreadable answer: {error}") from None
        if self._finish:
            return None
        self._close()
        raise PeerLost(f"{self._response.url}: the answer broke off")

    def _end(self, reason: str) -> Chunk:
        self._close()
        return Chunk(id="", finish_reason=reason, metrics=self._metrics())

    def _close(self) -> None:
        self._done = True
        self._response.close()

    def _metrics(self) -> RequestMetrics | None:
        tokens = self._usage.get("completion_tokens", 0)
        if not tokens:
            return None
        first, last = self._first or time.monotonic(), self._last
        decoding = last - first
        return RequestMetrics(
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            output_tokens=tokens,
            queue_time=0.0,
            time_to_first_token=first - self._asked,
            total_time=time.monotonic() - self._asked,
            decode_rate=(tokens - 1) / decoding if decoding > 0 else 0.0,
        )


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Lines of a stream of events, which may hold any character but these line ends.

    (httpx's own lines also end at U+2028 and its like.)
    """
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    yield rest


def _refusal(told: Any, status: int, fallback: str) -> RequestError:
    """The server's error object, or what its status says."""
    error = told.get("error") if isinstance(told, dict) else None
    message = error.get("message") if isinstance(error, dict) else error or fallback
    return RequestError(status, f"the server answered: {message}")
