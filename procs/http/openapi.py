"""The API's own description: request bodies are decoded by us, so they are described by us."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import SwaggerRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPIMediaType,
    Operation,
    Reference,
    RequestBody,
    Schema,
    SecurityScheme,
)

from procs.http.schemas import ChatRequest, CompletionRequest

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


def description() -> OpenAPIConfig:
    """Served under /schema, as JSON under /schema/openapi.json."""
    _, components = msgspec.json.schema_components(
        [CompletionRequest, ChatRequest], ref_template=REFERENCE
    )
    return OpenAPIConfig(
        title="ssd-pipe",
        version=version("ssd-pipe"),
        path="/schema",
        render_plugins=[SwaggerRenderPlugin()],
        components=Components(
            schemas={name: JsonSchema(content=s) for name, s in components.items()},
            security_schemes={"api_key": SecurityScheme(type="http", scheme="bearer")},
        ),
    )
