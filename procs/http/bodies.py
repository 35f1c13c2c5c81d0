"""What every route that takes a JSON body begins with: its type, its content, the model's name."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.di import NamedDependency, Provide
from litestar.params import RawBody

from procs.http import parse
from procs.http.errors import ApiError, call_fields
from procs.http.service import Service

HttpRequest = Request[Any, Any, Any]


def wants(kind: type[parse.Body]) -> dict[str, Provide]:
    """The dependency ``wanted`` of a route: its body, as ``kind``.

    Raises ApiError: 415 for a body that does not call itself JSON, 404 for another model; and as
    ``parse.decode``.
    """

    def read(request: HttpRequest, body: RawBody, service: NamedDependency[Service]) -> Any:
        # Only this type makes a browser ask before a foreign page may send it.
        if request.content_type[0] != "application/json":
            raise ApiError(415, "the content type must be application/json")
        content = parse.decode(body, kind)
        service.check_model(content.model)
        call_fields(request, parse.names_of(content))
        return content

    return {"wanted": Provide(read, sync_to_thread=False)}
