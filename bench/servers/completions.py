"""A client of OpenAI-compatible servers that sees every piece of an answer when it comes.

Prompts are sent as token ids, and token ids are asked for (``return_token_ids``, which vLLM, SGLang
and our gateway know), so that answers can be compared token by token. From a server that sends
none, counts come with the usage (``continuous_usage_stats``), and from one that has not even that,
from tokenizing the text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import msgspec

from bench.engines import Answer
from ssd_pipe.errors import PeerLost, RequestError
from ssd_pipe.params import SamplingParams
from ssd_pipe.text.tokenizer import Tokenizer

TIMEOUT = 300.0  # seconds between two pieces of an answer
CONNECTIONS = 512
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
OPTIONAL: tuple[dict[str, Any], ...] = (
    {"return_token_ids": True, "stream_options": CONTINUOUS, "ignore_eos": True},
    {"return_token_ids": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}},
)
"""What to ask for beyond OpenAI's fields; a server that refuses one kind is asked the next."""


class Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class Usage(msgspec.Struct):
    completion_tokens: int | None = None


class Piece(msgspec.Struct):
    """One event of a streamed completion; ``error`` ends it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class Completions:
    """``/v1/completions`` of the server at ``url``; may be used by several threads.

    Args:
        model: name the server knows its model by; empty asks it.
        key: bearer token; empty sends none.
        tokenizer: of the model, for servers that do not send token ids.
    """

    def __init__(self, url: str, model: str, key: str, tokenizer: Tokenizer) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=CONNECTIONS)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, limits=limits)
        self._model = model
        self._tokenizer = tokenizer
        self._asking = 0

    def healthy(self) -> bool:
        """Whether ``/health`` answers 200 now."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def metrics(self) -> str:
        """``/metrics`` as it is; empty if the server has none."""
        try:
            response = self._http.get("/metrics", timeout=10.0)
        except httpx.HTTPError:
            return ""
        return response.text if response.status_code == 200 else ""

    def find_model(self) -> str:
        """The model's name. Raises RequestError or PeerLost."""
        if not self._model:
            try:
                response = self._http.get("/v1/models")
                self._model = response.json()["data"][0]["id"]
            except httpx.HTTPError as error:
                raise PeerLost(f"{self._http.base_url}: {error}") from None
            except (ValueError, LookupError, TypeError):
                raise RequestError(502, f"{self._http.base_url}v1/models: no model") from None
        return self._model

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
        self._http.close()

    def _generate(
        self, tokens: Sequence[int], params: SamplingParams, optional: dict[str, Any]
    ) -> Answer:
        body = {"model": self.find_model(), "prompt": list(tokens), "stream": True}
        body |= {"max_tokens": params.max_tokens, "temperature": params.temperature}
        body |= {"top_p": params.top_p, "seed": params.seed}
        body |= optional
        if not params.ignore_eos:
            body.pop("ignore_eos", None)
        elif "ignore_eos" not in body:
            raise RequestError(400, "the server does not know ignore_eos", "ignore_eos")
        answer = Answer(started=time.monotonic(), arrivals=[], tokens=[], finish="")
        counted, text = 0, ""
        for piece in self._pieces(body):
            now = time.monotonic()
            if piece.error is not None:
                raise RequestError(502, f"the server broke off: {piece.error}")
            ids: list[int] = []
            for choice in piece.choices:
                ids += choice.token_ids or []
                text += choice.text
                answer.finish = choice.finish_reason or answer.finish
            came = len(ids)
            if not came and piece.usage is not None and piece.usage.completion_tokens:
                came = piece.usage.completion_tokens - counted
            elif not came and any(choice.text for choice in piece.choices) and not answer.tokens:
                came = max(1, len(self._tokenizer.encode(text)) - counted)
            if came > 0:
                answer.arrivals.append((now, came))
                counted += came
            answer.tokens += ids
        if not answer.tokens:
            answer.tokens = self._tokenizer.encode(text)
        return answer

    def _pieces(self, body: dict[str, Any]) -> Iterator[Piece]:
        decoder = msgspec.json.Decoder(Piece)
        try:
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise RequestError(response.status_code, response.text.strip()[:300])
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield decoder.decode(line[6:])
        except httpx.HTTPError as error:
            raise PeerLost(f"{self._http.base_url}: {type(error).__name__}: {error}") from None
        except msgspec.MsgspecError as error:
            raise RequestError(502, f"{self._http.base_url}: no OpenAI format: {error}") from None
