"""A client of any OpenAI-compatible server, in the shape of ``client.Client``. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import httpx

from ipc.messages.client import ChatMessage
from ssd_pipe.errors import ConfigError, PeerLost, RequestError
from ssd_pipe.params import SamplingParams
from ssd_pipe.server_stream import ServerStream, refusal

CONNECT_TIMEOUT, READ_TIMEOUT = 5.0, 300.0  # seconds; a long prompt makes the first token late
_PLAIN = ("temperature", "top_p")
_IF_SET = (
    "n",
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
        """Stream the answer to a conversation; what is refused raises RequestError here,
        as does text that is not Unicode (surrogates)."""
        body: dict[str, Any] = {
            "messages": [{"role": m.role, "content": m.content} for m in messages]
        }
        body |= {name: getattr(params, name) for name in self._plain}
        if chat_template_kwargs is not None:
            body["chat_template_kwargs"] = chat_template_kwargs
        return self._ask("chat/completions", body, params)

    def stream(self, prompt: str, params: SamplingParams) -> ServerStream:
        """Stream the text's continuation. Raises as ``chat``.

        ``max_tokens`` is always sent: servers end completions after 16 tokens by themselves.
        """
        body = {name: getattr(params, name) for name in (*_PLAIN, "max_tokens")}
        return self._ask("completions", {"prompt": prompt, **body}, params)

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

    def _ask(self, route: str, body: dict[str, Any], params: SamplingParams) -> ServerStream:
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        for name in _IF_SET:
            if getattr(params, name) != getattr(_DEFAULTS, name):
                body[name] = getattr(params, name)
        if params.stop:
            body["stop"] = list(params.stop)
        asked = time.monotonic()
        try:
            request = self._http.build_request("POST", f"{self.url}/{route}", json=body)
        except UnicodeEncodeError:  # surrogates: what was typed is not UTF-8
            raise RequestError(400, "the text is not valid Unicode") from None
        return ServerStream(self._send(request, stream=True), asked, params.n)

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
            raise refusal(told, response.status_code, response.reason_phrase)
        return response
