"""The web application: routes, errors, limits and the API key."""

from __future__ import annotations

import hmac
import os
from typing import Any

from litestar import Litestar, Router
from litestar.connection import ASGIConnection
from litestar.di import Provide
from litestar.handlers import BaseRouteHandler
from litestar.types import Guard

from procs.http import errors, openapi, routes_openai, routes_ops, routes_tokens
from procs.http.errors import ApiError
from procs.http.service import Service
from ssd_pipe.config import GatewaySection

KEY_VARIABLE = "SSD_API_KEY"


def api_key(gateway: GatewaySection) -> str:
    """The key clients must show; empty if none is asked for."""
    return gateway.api_key or os.environ.get(KEY_VARIABLE, "")


def build(service: Service) -> Litestar:
    """The application of one gateway. Only health, metrics, version and schema ask for no key."""
    gateway = service.config.gateway
    key = api_key(gateway)
    guards = [require(key)] if key else []
    app = Litestar(
        route_handlers=[
            Router(
                "/v1",
                route_handlers=[
                    routes_openai.completions,
                    routes_openai.chat_completions,
                    routes_openai.models,
                    routes_openai.model,
                ],
                guards=guards,
            ),
            Router(
                "/",
                route_handlers=[routes_tokens.tokenize, routes_tokens.detokenize],
                guards=guards,
            ),
            routes_ops.health,
            routes_ops.metrics,
            routes_ops.show_version,
            routes_ops.docs,
        ],
        dependencies={"service": Provide(lambda: service, sync_to_thread=False)},
        exception_handlers=errors.handlers(service.log),
        openapi_config=openapi.description(),
        request_max_body_size=gateway.max_body_bytes,
        logging_config=None,
    )
    openapi.describe_bodies(app)
    return app


def require(key: str) -> Guard:
    """A guard that refuses requests without ``key`` as bearer token."""
    expected = key.encode()

    def guard(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        # Compared in constant time; header values are latin-1.
        same = hmac.compare_digest(token.strip().encode("latin-1"), expected)
        if scheme.lower() != "bearer" or not same:
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY")

    return guard
