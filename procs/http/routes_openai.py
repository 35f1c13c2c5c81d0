"""The OpenAI-compatible routes."""

from __future__ import annotations

import secrets
import time
from typing import Any

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.response import Stream

from procs.http import openapi, parse
from procs.http.answers import Answers
from procs.http.bodies import HttpRequest, wants
from procs.http.chat import ChatRenderer
from procs.http.completions import CompletionRenderer
from procs.http.errors import ApiError
from procs.http.logprobs import CompletionLogprobWriter
from procs.http.responses import ChatCompletion, Completion, ModelCard, ModelList
from procs.http.schemas import ChatRequest, CompletionRequest
from procs.http.service import Service
from procs.http.sse import stream, unless_gone
from procs.http.usage import Reporting


@post(
    "/completions",
    dependencies=wants(CompletionRequest),
    operation_class=openapi.CompletionOperation,
    responses=openapi.answers(Completion),
    status_code=200,
)
async def completions(
    request: HttpRequest,
    wanted: NamedDependency[CompletionRequest],
    service: NamedDependency[Service],
) -> Response[Completion] | Stream:
    """Continue a text; with ``stream``, as server-sent events."""
    prompts = parse.prompts(wanted)
    n = parse.choices(wanted, prompts)
    if wanted.best_of not in (None, n):
        raise ApiError(400, "only best_of = n is supported", "best_of")
    params = parse.sampling(wanted, n, service.max_model_len)
    echoes = [await service.text_of(p) if wanted.echo else "" for p in prompts]
    answers = service.answers(prompts, params, parse.given_limit(wanted))
    renderer = CompletionRenderer(
        answers=answers,
        id=_new_id("cmpl"),
        model=service.model_name,
        created=int(time.time()),
        reporting=Reporting.of(wanted.stream_options),
        echoes=[echo for echo in echoes for _ in range(n)],
        writers=[CompletionLogprobWriter() for _ in answers.answers]
        if params.logprobs is not None
        else [],
        token_ids=bool(wanted.return_token_ids),
    )
    if wanted.stream:
        return await stream(request, answers, renderer)
    return Response(await _whole(request, answers, renderer))


@post(
    "/chat/completions",
    dependencies=wants(ChatRequest),
    operation_class=openapi.ChatOperation,
    responses=openapi.answers(ChatCompletion),
    status_code=200,
)
async def chat_completions(
    request: HttpRequest,
    wanted: NamedDependency[ChatRequest],
    service: NamedDependency[Service],
) -> Response[ChatCompletion] | Stream:
    """Answer a conversation; with ``stream``, as server-sent events."""
    prompt = parse.conversation(wanted)
    n = parse.choices(wanted, [prompt])
    params = parse.sampling(wanted, n, service.max_model_len)
    answers = service.answers([prompt], params, parse.given_limit(wanted))
    renderer = ChatRenderer(
        answers=answers,
        id=_new_id("chatcmpl"),
        model=service.model_name,
        created=int(time.time()),
        reporting=Reporting.of(wanted.stream_options),
        with_logprobs=params.logprobs is not None,
        separate_reasoning=wanted.separate_reasoning is not False,
    )
    if wanted.stream:
        return await stream(request, answers, renderer)
    return Response(await _whole(request, answers, renderer))


@get("/models")
async def models(service: NamedDependency[Service]) -> ModelList:
    """The one model that is served."""
    return ModelList(data=[_card(service)])


@get("/models/{name:path}")
async def model(name: FromPath[str], service: NamedDependency[Service]) -> ModelCard:
    """The served model, by any of its names."""
    service.check_model(name.removeprefix("/"))
    return _card(service)


async def _whole(
    request: HttpRequest, answers: Answers, renderer: ChatRenderer | CompletionRenderer
) -> Any:
    try:
        await unless_gone(request, answers.rest())
        return renderer.whole()
    finally:
        await answers.aclose()


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


def _card(service: Service) -> ModelCard:
    return ModelCard(
        id=service.model_name, created=service.created, max_model_len=service.max_model_len
    )
