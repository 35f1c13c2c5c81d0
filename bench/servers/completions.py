"""A client of OpenAI-compatible servers that sees every piece of an answer when it comes.

Prompts are sent as token ids, and token ids are asked for (``return_token_ids``, which vLLM, SGLang
and our gateway know), so that answers can be compared token by token. From a server that sends
none, counts come with the usage (``continuous_usage_stats``), and from one that has not even that,
from tokenizing the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import httpx

from bench.engines import Answer
from ssd_pipe.errors import RequestError
from ssd_pipe.openai_api import OpenAIApi, events
from ssd_pipe.params import SamplingParams
from ssd_pipe.text.tokenizer import Tokenizer

CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
OPTIONAL: tuple[dict[str, Any], ...] = (
    {"return_token_ids": True, "stream_options": CONTINUOUS, "ignore_eos": True},
    {"return_token_ids": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}},
)
"""What to ask for beyond OpenAI's fields; a server that refuses one kind is asked the next."""


class Completions:
    """``/v1/completions`` of the server at ``url``; may be used by several threads.

    Args:
        model: name the server knows its model by; empty asks it.
        key: bearer token; empty sends none.
        tokenizer: of the model, for servers that do not send token ids.
    """

    def __init__(self, url: str, model: str, key: str, tokenizer: Tokenizer) -> None:
        self._api = OpenAIApi(url, model, key)
        self._root = self._api.url.removesuffix("/v1")
        self._tokenizer = tokenizer
        self._asking = 0

    def healthy(self) -> bool:
        """Whether ``/health`` answers 200 now."""
        return self._look("/health", 5.0) is not None

    def metrics(self) -> str:
        """``/metrics`` as it is; empty if the server has none."""
        return self._look("/metrics", 10.0) or ""

    def find_model(self) -> str:
        """The model's name. Raises RequestError or PeerLost."""
        return self._api.find_model()

    def generate(self, tokens: Sequence[int], params: SamplingParams) -> Answer:
        """One answer. Raises RequestError if it is refused, PeerLost if the server goes away."""
        asking = self._asking
        while True:
            try:
                answer = self._generate(tokens, params, OPTIONAL[asking])
            except RequestError as error:
                asking += 1
                if error.code not in (400, 422) or asking == len(OPTIONAL):
                    raise
            else:
                self._asking = asking
                return answer

    def close(self) -> None:
        self._api.close()

    def _generate(
        self, tokens: Sequence[int], params: SamplingParams, optional: dict[str, Any]
    ) -> Answer:
        body: dict[str, Any] = {"prompt": list(tokens), "max_tokens": params.max_tokens}
        body |= {"temperature": params.temperature, "top_p": params.top_p, "seed": params.seed}
        body |= optional
        if not params.ignore_eos:
            body.pop("ignore_eos", None)
        elif "ignore_eos" not in body:
            raise RequestError(400, "the server does not know ignore_eos", "ignore_eos")
        answer = Answer(started=time.monotonic(), arrivals=[], tokens=[], finish="")
        counted, text = 0, ""
        with closing(self._api.ask("completions", body)) as response:
            for event in events(response):
                now = time.monotonic()
                choices = event.choices or []
                ids: list[int] = []
                for choice in choices:
                    ids += choice.token_ids or []
                    text += choice.text or ""
                    answer.finish = choice.finish_reason or answer.finish
                came = len(ids)
                if not came and event.usage is not None and event.usage.completion_tokens:
                    came = event.usage.completion_tokens - counted
                elif not came and any(choice.text for choice in choices) and not answer.tokens:
                    came = max(1, len(self._tokenizer.encode(text)) - counted)
                if came > 0:
                    answer.arrivals.append((now, came))
                    counted += came
                answer.tokens += ids
        if not answer.tokens:
            answer.tokens = self._tokenizer.encode(text)
        return answer

    def _look(self, path: str, timeout: float) -> str | None:
        """A page of the server's, None if it has none."""
        try:
            response = self._api.http.get(self._root + path, timeout=timeout)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None
