"""Every failure as an HTTP status and OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap
from structlog.typing import FilteringBoundLogger

from procs.error_text import shortened
from procs.http.responses import ErrorBody, ErrorDetail
from ssd_pipe.errors import RequestError, SsdPipeError

CLIENT_GONE = 499
UNSUPPORTED = "is not supported by this server"
RETRY_AFTER = {429: "1", 503: "1"}  # seconds

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_FIELDS = {"token_ids": "prompt"}  # names of ours that the API does not know


class ApiError(SsdPipeError):
    """An error of this gateway's own.

    Attributes:
        status: HTTP status.
        field: the request field at fault, empty if none is.
        code: OpenAI's name of the error, empty = by the status.
    """

    def __init__(self, status: int, message: str, field: str = "", code: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.status = status
        self.field = field
        self.code = code


def call_fields(request: Request[Any, Any, Any], names: Mapping[str, str]) -> None:
    """What the pipeline says of our fields will be told of those that ``request`` has for them."""
    request.state.names = names


def describe(error: Exception, request: Request[Any, Any, Any]) -> tuple[int, ErrorBody]:
    """HTTP status and body for any exception; an unexpected one tells nothing of itself."""
    field, code = "", ""
    if isinstance(error, ApiError):
        status, message, field, code = error.status, str(error), error.field, error.code
    elif isinstance(error, RequestError):
        status, message, field = error.code, str(error), error.field
        for ours, theirs in (_FIELDS | request.state.get("names", {})).items():
            if field == ours or field.startswith(f"{ours}."):
                message = message.replace(f"{field}:", f"{theirs}:", 1)
                field = theirs
                break
    elif isinstance(error, SsdPipeError):  # PeerLost, mostly; its text names local paths
        status, message = 503, "the pipeline does not answer"
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    else:
        status, message = 500, "internal error"
    return status, ErrorBody(
        ErrorDetail(
            message=shortened(message),
            type=_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
            param=shortened(field) or None,
            code=code or _CODES.get(status, status),
        )
    )


def handlers(log: FilteringBoundLogger) -> ExceptionHandlersMap:
    """Exception handlers of the application; what nobody expected is logged with its traceback."""

    def answer(request: Request[Any, Any, Any], error: Exception) -> Response[ErrorBody]:
        status, body = describe(error, request)
        if not isinstance(error, SsdPipeError | HTTPException):
            log.error("request failed", path=request.url.path, exc_info=error)
        elif status >= 503:
            log.warning("request failed", path=request.url.path, reason=str(error), file_only=True)
        headers = {"Retry-After": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(body, status_code=status, headers=headers, media_type=MediaType.JSON)

    return {SsdPipeError: answer, HTTPException: answer, Exception: answer}
