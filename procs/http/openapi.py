"""The API's own description: request bodies are decoded by us, so they are described by us."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from litestar import Litestar
from litestar.openapi import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPIMediaType,
    Operation,
    Reference,
    RequestBody,
    Schema,
    SecurityScheme,
)

from procs.http.responses import ErrorBody
from procs.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

REFERENCE = "#/components/schemas/{name}"


@dataclass
class JsonSchema(Schema):
    """A schema that is already in its final form."""

    content: dict[str, Any] | None = None

    def to_schema(self) -> dict[str, Any]:
        """As it is."""
        return dict(self.content or {})


def _body(kind: type) -> RequestBody:
    reference = Reference(ref=REFERENCE.format(name=kind.__name__))
    return RequestBody(content={"application/json": OpenAPIMediaType(reference)}, required=True)


def answers(kind: type) -> dict[int, ResponseSpec]:
    """What a generating route may answer."""
    texts = {400: "invalid", 401: "no valid API key", 404: "unknown model", 413: "too large"}
    texts |= {415: "not JSON", 429: "too many requests"}
    texts |= {503: "the pipeline cannot serve", 504: "out of time"}
    errors = {
        status: ResponseSpec(ErrorBody, description=text, generate_examples=False)
        for status, text in texts.items()
    }
    whole = ResponseSpec(kind, description="the whole answer", generate_examples=False)
    return {200: whole, **errors}


@dataclass
class CompletionOperation(Operation):
    """``POST /v1/completions``."""

    def __post_init__(self) -> None:
        self.request_body = _body(CompletionRequest)


@dataclass
class ChatOperation(Operation):
    """``POST /v1/chat/completions``."""

    def __post_init__(self) -> None:
        self.request_body = _body(ChatRequest)


@dataclass
class TokenizeOperation(Operation):
    """``POST /tokenize``."""

    def __post_init__(self) -> None:
        self.request_body = _body(TokenizeRequest)


@dataclass
class DetokenizeOperation(Operation):
    """``POST /detokenize``."""

    def __post_init__(self) -> None:
        self.request_body = _body(DetokenizeRequest)


def description() -> OpenAPIConfig:
    """Served as JSON under /schema and /schema/openapi.json."""
    return OpenAPIConfig(
        title="ssd-pipe",
        version=version("ssd-pipe"),
        path="/schema",
        render_plugins=[JsonRenderPlugin()],  # a page would load its scripts from elsewhere
        components=Components(
            security_schemes={"api_key": SecurityScheme(type="http", scheme="bearer")}
        ),
    )


def describe_bodies(app: Litestar) -> None:
    """Put the schemas that ``_body`` refers to beside those that the framework made."""
    _, schemas = msgspec.json.schema_components(
        [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest],
        ref_template=REFERENCE,
    )
    described = app.openapi_schema.components.schemas
    described.update({name: JsonSchema(content=s) for name, s in schemas.items()})
