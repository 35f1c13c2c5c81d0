"""Structured output under the names that clients of other servers know."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.messages.client import Chunk, RequestMetrics
from tests.http.server import PlayedFrontend, Server, gateway_before

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LARK = 'start: "a" | "b"'
BY_SCHEMA = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
BY_REGEX = {"type": "regex", "regex": "[ab]"}
BY_CHOICE = {"type": "choice", "choice": ["a", "b"]}
BY_GRAMMAR = {"type": "grammar", "grammar": LARK}
METRICS = RequestMetrics(
    prompt_tokens=1,
    output_tokens=1,
    queue_time=0.0,
    time_to_first_token=0.1,
    total_time=0.1,
    decode_rate=0.0,
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PlayedFrontend, Server]]:
    folder: Path = tmp_path_factory.mktemp("formats")
    answer = Chunk(id="", text="a", token_ids=(5,), finish_reason="stop", metrics=METRICS)
    with (
        contextlib.closing(PlayedFrontend(folder, [answer])) as frontend,
        gateway_before(frontend) as (_, server),
    ):
        yield frontend, server


def asked(played: tuple[PlayedFrontend, Server], **fields: Any) -> Any:
    """The format that the pipeline is asked for."""
    frontend, server = played
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": HELLO}),
    ):
        reply = server.post(path, **body, **fields)
        assert reply.status == 200, reply.body
    first, second = (submit.params.response_format for submit in frontend.submitted[-2:])
    assert first == second
    return first


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": SCHEMA}, BY_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, BY_SCHEMA),
        ({"json_schema": SCHEMA}, BY_SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, BY_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, BY_SCHEMA),
        ({"guided_regex": "[ab]"}, BY_REGEX),
        ({"regex": "[ab]"}, BY_REGEX),
        ({"structured_outputs": {"regex": "[ab]", "json_object": False}}, BY_REGEX),
        ({"guided_choice": ["a", "b"], "response_format": {"type": "text"}}, BY_CHOICE),
        ({"structured_outputs": {"choice": ["a", "b"]}}, BY_CHOICE),
        ({"guided_grammar": LARK}, BY_GRAMMAR),
        ({"grammar": LARK}, BY_GRAMMAR),
        ({"ebnf": LARK}, BY_GRAMMAR),
        ({"structured_outputs": {"grammar": LARK, "disable_fallback": False}}, BY_GRAMMAR),
        ({"structured_outputs": {"json_object": True}}, {"type": "json_object"}),
        ({"response_format": BY_SCHEMA}, BY_SCHEMA),
        ({"structured_outputs": None, "guided_json": None}, None),
    ],
)
def test_every_name_asks_for_the_same(played, fields: dict[str, Any], expected: Any) -> None:
    assert asked(played, **fields) == expected


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"guided_json": SCHEMA, "response_format": BY_REGEX}, "guided_json", "response_format"),
        ({"regex": "a", "grammar": LARK}, "grammar", "not together with regex"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "not together with structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "not supported",
        ),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "none of"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ],
)
def test_what_does_not_go_together(played, fields: dict[str, Any], field: str, words: str) -> None:
    reply = played[1].post("/v1/completions", prompt="x", **fields)
    assert (reply.status, reply.error["param"]) == (400, field)
    assert words in reply.error["message"]


def test_a_seed_of_minus_one_is_none(played) -> None:
    frontend, server = played
    for seed, expected in ((-1, None), (0, 0), (None, None)):
        assert server.post("/v1/completions", prompt="x", seed=seed).status == 200
        assert frontend.submitted[-1].params.seed == expected
