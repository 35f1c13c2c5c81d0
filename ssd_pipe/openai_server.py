"""A client of any OpenAI-compatible server, in the shape of ``client.Client``. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ipc.messages.client import ChatMessage
from ssd_pipe.openai_api import OpenAIApi
from ssd_pipe.params import SamplingParams
from ssd_pipe.server_stream import ServerStream

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
        self._plain = (*_PLAIN, "max_tokens") if limited else _PLAIN
        self._api = OpenAIApi(url, model, api_key)
        try:
            self.model = self._api.find_model()
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
        self._api.close()

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
        body["stream_options"] = {"include_usage": True}
        for name in _IF_SET:
            if getattr(params, name) != getattr(_DEFAULTS, name):
                body[name] = getattr(params, name)
        if params.stop:
            body["stop"] = list(params.stop)
        asked = time.monotonic()
        return ServerStream(self._api.ask(route, body), asked, params.n)
