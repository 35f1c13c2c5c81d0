"""From OpenAI's ``response_format`` to a grammar, or an error that says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ipc.errors import shown
from ssd_pipe.errors import RequestError
from ssd_pipe.params import MAX_FORMAT_BYTES
from ssd_pipe.text.deep_stack import on_deep_stack

KINDS = ("text", "json_object", "json_schema", "regex", "choice", "grammar")
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
        got = "nothing" if kind is None else shown(kind)
        raise _error(f"must be one of {', '.join(KINDS)}, got {got}", "type")
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
        # A schema beside it, as llama.cpp has it, is not to be passed over.
        given = response_format.get("schema")
        grammar = _of_schema({"type": "object"} if given is None else _object(given, "schema"), "")
    elif kind == "json_schema":
        grammar = _of_schema(_schema(response_format.get("json_schema")), "json_schema")
    elif kind == "regex":
        grammar = llguidance.LLMatcher.grammar_from_regex(_text(response_format, "regex"))
    elif kind == "grammar":
        grammar = _of_lark(_text(response_format, "grammar"))
    else:
        grammar = _of_choice(response_format.get("choice"))
    reason = on_deep_stack(lambda: llguidance.LLMatcher.validate_grammar(grammar))
    if reason and not reason.startswith("WARNING"):
        raise _error(reason.strip(), "" if kind == "json_object" else kind)
    return grammar


def _schema(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or "schema" not in given:
        raise _error("must be an object with the field schema", "json_schema")
    return _object(given["schema"], "json_schema.schema")


def _object(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _error(f"must be an object, got {shown(given)}", where)
    return given


def _text(response_format: Mapping[str, Any], name: str) -> str:
    text = response_format.get(name)
    if not isinstance(text, str) or not text:
        raise _error("must be a text that is not empty", name)
    return text


def _of_lark(grammar: str) -> str:
    if grammar.lstrip().startswith("{"):  # the library's own form
        raise _error("must be a Lark grammar", "grammar")
    if "::=" in grammar and "start" not in grammar:
        raise _error("must be a Lark grammar (start: ...), not GBNF or EBNF", "grammar")
    return grammar


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
