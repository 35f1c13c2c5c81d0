"""What the pipeline says of an answer, as the openai package reads it; what requests ask of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from ipc.messages.client import Alternative, Chunk, RequestMetrics, TokenLogprob
from tests.http.server import PlayedFrontend, Server, gateway_before

FACE = "🙂".encode()
ENTRIES = (
    TokenLogprob(5, -0.1, 1, b"ab", (Alternative(5, -0.1, b"ab"), Alternative(6, -2.5, b"b"))),
    TokenLogprob(7, -0.5, 1, FACE[:2], (Alternative(7, -0.5, FACE[:2]),)),
    TokenLogprob(8, -0.25, 2, FACE[2:], (Alternative(9, -0.2, b"x"),)),
    TokenLogprob(2, -1.0, 1, b"c", (Alternative(2, -1.0, b"c"),)),
)
METRICS = RequestMetrics(
    prompt_tokens=3,
    output_tokens=4,
    queue_time=0.0,
    time_to_first_token=0.1,
    total_time=0.2,
    decode_rate=30.0,
    cached_prompt_tokens=2,
)
CHUNKS = [
    Chunk(id="", text="ab", token_ids=(5,), logprobs=ENTRIES[:1]),
    Chunk(id="", text="", token_ids=(7,), logprobs=ENTRIES[1:2]),
    Chunk(
        id="",
        text="🙂c",
        token_ids=(8, 2),
        logprobs=ENTRIES[2:],
        finish_reason="length",
        metrics=METRICS,
    ),
]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def played(tmp_path: Path) -> Iterator[tuple[PlayedFrontend, Server, openai.OpenAI]]:
    with (
        contextlib.closing(PlayedFrontend(tmp_path, CHUNKS)) as frontend,
        gateway_before(frontend) as (_, server),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api,
    ):
        yield frontend, server, api


def test_chat_logprobs(played) -> None:
    frontend, _, api = played
    asked = {"model": "model", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    whole = api.chat.completions.create(**asked).choices[0].logprobs.content
    assert frontend.submitted[-1].params.logprobs == 2
    assert [e.token for e in whole] == ["ab", "\ufffd", "\ufffd\ufffd", "c"]
    assert b"".join(bytes(e.bytes) for e in whole).decode() == "ab🙂c"
    assert [e.logprob for e in whole] == [-0.1, -0.5, -0.25, -1.0]
    assert [(a.token, a.logprob) for a in whole[0].top_logprobs] == [("ab", -0.1), ("b", -2.5)]
    streamed = []
    for chunk in api.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == whole
    api.chat.completions.create(**(asked | {"top_logprobs": 0}))
    assert frontend.submitted[-1].params.logprobs == 0


def test_completion_logprobs(played) -> None:
    frontend, _, api = played
    asked = {"model": "model", "prompt": "x", "logprobs": 1}
    whole = api.completions.create(**asked).choices[0]
    assert frontend.submitted[-1].params.logprobs == 1
    assert whole.text == "ab🙂c"
    assert whole.logprobs.tokens == ["ab", r"bytes:\xf0\x9f", r"bytes:\x99\x82", "c"]
    assert whole.logprobs.token_logprobs == [-0.1, -0.5, -0.25, -1.0]
    assert whole.logprobs.text_offset == [0, 2, 2, 3]
    assert whole.logprobs.top_logprobs[2] == {"x": -0.2, r"bytes:\x99\x82": -0.25}
    offsets, tokens = [], []
    for chunk in api.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs is not None:
            offsets += chunk.choices[0].logprobs.text_offset
            tokens += chunk.choices[0].logprobs.tokens
    assert (offsets, tokens) == (whole.logprobs.text_offset, whole.logprobs.tokens)


def test_no_logprobs_unless_asked_for_and_usage_as_measured(played) -> None:
    _, _, api = played
    text = api.completions.create(model="model", prompt="x")
    chat = api.chat.completions.create(model="model", messages=HELLO)
    assert text.choices[0].logprobs is None
    assert chat.choices[0].logprobs is None
    for usage in (text.usage, chat.usage):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 4, 7)
        assert usage.prompt_tokens_details.cached_tokens == 2


def test_sampling_fields_arrive_as_they_were_given(played) -> None:
    frontend, _, api = played
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    api.chat.completions.create(
        model="model",
        messages=HELLO,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"5": -100},
        seed=11,
        stop=["a", "b"],
        response_format=form,
        extra_body={
            "top_k": 4,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "stop_token_ids": [6],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "bad_words": ["no"],
        },
    )
    params = frontend.submitted[-1].params
    assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.5, 0.9)
    assert (params.presence_penalty, params.frequency_penalty) == (0.25, -0.5)
    assert (params.logit_bias, params.seed, params.stop) == ({5: -100.0}, 11, ("a", "b"))
    assert (params.top_k, params.min_p, params.repetition_penalty) == (4, 0.125, 1.5)
    assert (params.min_tokens, params.stop_token_ids) == (2, (6,))
    assert (params.ignore_eos, params.include_stop_str_in_output) == (True, True)
    assert (params.skip_special_tokens, params.bad_words) == (False, ("no",))
    assert params.response_format == form
    api.completions.create(model="model", prompt="x", extra_body={"allowed_token_ids": [5, 6]})
    assert frontend.submitted[-1].params.allowed_token_ids == (5, 6)


def test_what_is_not_given_has_the_defaults_of_the_api(played) -> None:
    frontend, _, api = played
    api.completions.create(model="model", prompt="x")
    params = frontend.submitted[-1].params
    assert (params.max_tokens, params.temperature, params.seed) == (16, 1.0, None)
    api.chat.completions.create(model="model", messages=HELLO)
    assert frontend.submitted[-1].params.max_tokens == 64  # all that the context holds


def test_a_param_of_the_struct_that_is_out_of_range_is_named(played) -> None:
    _, server, _ = played
    for field, value in (
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("logit_bias", {"1": 200}),
        ("min_tokens", 17),
    ):
        reply = server.post("/v1/completions", prompt="x", **{field: value})
        assert (reply.status, reply.error["param"]) == (400, field)
