"""Structured output as clients of vLLM, SGLang and llama.cpp ask for it, as a ``response_format``.

Each field is another name of one of its types. What the engine says of the format is told of the
field that the request has it in.
"""

from __future__ import annotations

from typing import Any

import msgspec

from procs.http.errors import UNSUPPORTED, ApiError
from procs.http.schemas import GenerationRequest

_FIELDS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
    "structured_outputs.json": "json_schema",
    "structured_outputs.regex": "regex",
    "structured_outputs.choice": "choice",
    "structured_outputs.grammar": "grammar",
    "structured_outputs.json_object": "json_object",
}
"""Type of a response format, by the field that asks for it."""


def given_format(request: GenerationRequest) -> tuple[str, Any]:
    """The field that says what the answer must look like, and its value; ("", None) without one.

    Raises ApiError (400) if there are two, or ``structured_outputs`` that ask for nothing or for
    what there is not.
    """
    outputs = request.structured_outputs
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(outputs, name, None):
            where = f"structured_outputs.{name}"
            raise ApiError(400, UNSUPPORTED, where, "unsupported_parameter")
    given: dict[str, Any] = {"response_format": request.response_format}
    for name in _FIELDS:
        outer, _, inner = name.partition(".")
        given[name] = getattr(outputs, inner, None) if inner else getattr(request, outer)
    nothing = {"response_format": {"type": "text"}, "structured_outputs.json_object": False}
    found = [(k, v) for k, v in given.items() if v not in (None, "", nothing.get(k))]
    if len(found) > 1:
        raise ApiError(400, f"not together with {found[0][0]}", found[1][0])
    if outputs is not None and not found:
        raise ApiError(400, "asks for none of json, regex, choice, grammar", "structured_outputs")
    return found[0] if found else ("", None)


def response_format(request: GenerationRequest) -> dict[str, Any] | None:
    """What the request asks for, under whatever name. Raises as ``given_format``, and ApiError
    (400) for a schema that is not valid JSON."""
    name, value = given_format(request)
    if name not in _FIELDS:
        return request.response_format
    kind = _FIELDS[name]
    if kind == "json_object":
        return {"type": kind}
    if kind == "json_schema":
        return {"type": kind, kind: {"schema": _schema(name, value)}}
    return {"type": kind, kind: value}


def _schema(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"is not valid JSON: {error}", name) from None
