"""From OpenAI's ``response_format`` to a grammar, or an error that says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ssd_pipe.errors import RequestError
from ssd_pipe.params import MAX_FORMAT_BYTES
from ssd_pipe.text.deep_stack import on_deep_stack

KINDS = ("text", "json_object", "json_schema", "regex", "choice")
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
"""Between the parts of a JSON text; unbounded, a small model may never leave it."""

_FIELD = "response_format"


def grammar_of(response_format: Mapping[str, Any] | None) -> str:
    """The grammar in llguidance's form; empty if any text will do.

    Raises RequestError (400) with the library's reason for a schema or regex it cannot serve.
    """
    if response_format is None:
        return ""
    kind = response_format.get("type")
    if kind not in KINDS:
        raise _error(f"must be one of {', '.join(KINDS)}, got {kind!r}", "type")
    if kind == "text":
        return ""
    import llguidance  # 60 ms, for those who ask for a grammar

    try:
        size = len(json.dumps(response_format))
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(f"is not JSON: {error}") from None
    if size > MAX_FORMAT_BYTES:
        raise _error(f"has {size} bytes, the limit is {MAX_FORMAT_BYTES}")
    if kind == "json_object":
        grammar = _of_schema({"type": "object"}, _FIELD)
    elif kind == "json_schema":
        grammar = _of_schema(_schema(response_format.get("json_schema")), "json_schema")
    elif kind == "regex":
        regex = response_format.get("regex")
        if not isinstance(regex, str) or not regex:
            raise _error("must be a text that is not empty", "regex")
        grammar = llguidance.LLMatcher.grammar_from_regex(regex)
    else:
        grammar = _of_choice(response_format.get("choice"))
    reason = on_deep_stack(lambda: llguidance.LLMatcher.validate_grammar(grammar))
    if reason and not reason.startswith("WARNING"):
        raise _error(reason.strip(), "" if kind == "json_object" else kind)
    return grammar


def _schema(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or "schema" not in given:
        raise _error("must be an object with the field schema", "json_schema")
    schema = given["schema"]
    if not isinstance(schema, dict):
        raise _error(f"must be an object, got {schema!r}", "json_schema.schema")
    return schema


def _of_schema(schema: dict[str, Any], where: str) -> str:
    import llguidance

    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError as error:
        raise _error(str(error), where) from None


def _of_choice(choice: Any) -> str:
    good = isinstance(choice, list | tuple) and choice
    if not good or not all(isinstance(text, str) and text for text in choice):
        raise _error("must be a list of texts, none of them empty", "choice")
    # a Lark string literal is written as a JSON one
    return "start: " + " | ".join(json.dumps(text) for text in choice)


def _error(message: str, part: str = "") -> RequestError:
    return RequestError(400, message, f"{_FIELD}.{part}" if part else _FIELD)
