"""Routes for operators: health, metrics, version, and the way to the API's description."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency
from litestar.response import Redirect
from prometheus_client import CONTENT_TYPE_LATEST

from procs.http.health import Health, examine
from procs.http.metrics import exposition
from procs.http.service import Service
from ssd_pipe.errors import SsdPipeError

SCRAPE_DEADLINE = 3.0  # seconds
METRICS_TYPE = CONTENT_TYPE_LATEST.partition("; charset")[0]  # the framework adds that


class Version(msgspec.Struct, frozen=True):
    version: str


@get(["/health", "/ping"])
async def health(service: NamedDependency[Service]) -> Response[Health]:
    """200 when the pipeline serves, also without its draft; 503 with the reason when it cannot."""
    if service.stopping:
        found = Health(status="unavailable", reason=f"stopping: {service.stopping}")
    else:
        found = await examine(service.client, service.config.run)
    return Response(found, status_code=503 if found.status == "unavailable" else 200)


@get("/metrics", media_type=METRICS_TYPE)
async def metrics(service: NamedDependency[Service]) -> bytes:
    """Prometheus metrics; without an answer of the pipeline, ``ssd_pipe:up`` is 0."""
    reply = None
    try:
        async with asyncio.timeout(SCRAPE_DEADLINE):
            reply = await service.client.status()
    except (TimeoutError, SsdPipeError):
        pass
    return exposition(reply, service.histograms, service.model_name)


@get("/version")
async def show_version() -> Version:
    """The version of this program."""
    return Version(version("ssd-pipe"))


@get("/docs", include_in_schema=False)
async def docs() -> Redirect:
    """Where people look for the API's description."""
    return Redirect("/schema")
