"""The client of OpenAI-compatible servers, against our own gateway."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.messages.client import ChatMessage, Chunk, RequestMetrics
from ipc.messages.requests import TokensOut
from ssd_pipe.errors import ConfigError, PeerLost, RequestError
from ssd_pipe.openai_server import OpenAIServer
from ssd_pipe.params import SamplingParams
from ssd_pipe.server_stream import ServerChunk
from tests.frontend_peer import Pipeline, pipeline
from tests.http.played_server import delta, played
from tests.http.server import PlayedFrontend, gateway_before
from tests.pipelines import command
from tests.text.vocabularies import byte_level

HELLO = [ChatMessage("system", "be brief"), ChatMessage("user", "hi")]
METRICS = RequestMetrics(
    prompt_tokens=5,
    output_tokens=3,
    queue_time=0.0,
    time_to_first_token=0.1,
    total_time=0.2,
    decode_rate=9.0,
)
PARAMS = SamplingParams()


def test_parameters_go_out_and_any_text_comes_back(shm_dir: Path) -> None:
    texts = ["a\u2028b\x85", "\r\n\x0b", "データ"]
    chunks = [Chunk(id="", text=text, token_ids=(i,)) for i, text in enumerate(texts)]
    chunks.append(Chunk(id="", finish_reason="length", metrics=METRICS))
    frontend = PlayedFrontend(shm_dir, chunks)
    params = SamplingParams(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=4, stop=("x", "y"),
        ignore_eos=True, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5,
        min_tokens=2, timeout=50.0,
    )  # fmt: skip
    variables = {"enable_thinking": False}
    try:
        with gateway_before(frontend) as (_, place), OpenAIServer(place.url) as server:
            got = list(server.chat(HELLO, params, chat_template_kwargs=variables))
    finally:
        frontend.close()
    assert "".join(chunk.text for chunk in got) == "".join(texts)
    assert got[-1].finish_reason == "length"
    metrics = got[-1].metrics
    assert metrics is not None
    assert (metrics.prompt_tokens, metrics.output_tokens) == (5, 3)
    assert 0 < metrics.time_to_first_token <= metrics.total_time
    (submitted,) = frontend.submitted
    assert submitted.params == params
    assert submitted.chat_template_kwargs == variables
    assert submitted.messages == tuple(HELLO)


USAGE = {"prompt_tokens": 4, "completion_tokens": 7}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_come_apart_from_the_text(name: str) -> None:
    events = [
        delta(role="assistant", content=""),
        delta(**{name: "hm"}),
        delta(**{name: "m", "content": "so"}),
        delta(finish="stop", content=None),
        {"choices": [], "usage": USAGE},
    ]
    with played(*events) as place, OpenAIServer(place.url) as server:
        got = list(server.chat(HELLO, PARAMS))
    assert [(c.reasoning, c.text) for c in got if isinstance(c, ServerChunk)] == [
        ("hm", ""),
        ("m", "so"),
        ("", ""),
    ]
    assert got[-1].finish_reason == "stop"


def test_each_of_several_answers_has_an_end_of_its_own() -> None:
    events = [
        delta(1, content="b"),
        delta(0, content="a"),
        delta(1, finish="length", content="c"),
        delta(7, content="of nobody"),
        {"choices": [{"delta": {"content": "d"}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": USAGE},
    ]
    with played(*events) as place, OpenAIServer(place.url) as server:
        got = list(server.chat(HELLO, SamplingParams(n=2)))
        (asked,) = place.asked
    assert asked["n"] == 2
    assert [(c.index, c.text, c.finish_reason) for c in got] == [
        (1, "b", None),
        (0, "a", None),
        (1, "c", None),
        (1, "", "length"),
        (0, "d", None),
        (0, "", "tool_calls"),
    ]
    assert [c.metrics and c.metrics.output_tokens for c in got] == [None] * 5 + [7]


@pytest.mark.parametrize("came", [0, 1])
def test_answers_that_never_came_are_not_made_up(came: int) -> None:
    events = [delta(0, finish="stop", content="a"), {"choices": [], "usage": USAGE}]
    with played(*events[1 - came :]) as place, OpenAIServer(place.url) as server:
        stream = server.chat(HELLO, SamplingParams(n=2))
        got = []
        with pytest.raises(PeerLost, match=f"gave {came} of the 2 answers"):
            got.extend(iter(stream.__next__, None))
        assert next(stream, None) is None


def test_an_error_of_null_is_none() -> None:
    event = delta(finish="stop", content="a") | {"error": None}
    with played(event) as place, OpenAIServer(place.url) as server:
        got = list(server.chat(HELLO, PARAMS))
    assert [(c.text, c.finish_reason) for c in got] == [("a", None), ("", "stop")]


@pytest.mark.parametrize("error", ["too hot", {"message": "too hot"}])
def test_an_error_in_an_answer_is_the_server_s_own_words(error: Any) -> None:
    with played(delta(content="a"), {"error": error}) as place, OpenAIServer(place.url) as server:
        stream = server.chat(HELLO, PARAMS)
        assert next(stream).text == "a"
        with pytest.raises(RequestError, match="the server answered: too hot"):
            next(stream)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"delta": {"content": ["a"]}}]},
        {"choices": [{"delta": {"reasoning_content": [{"text": "a"}]}}]},
        {"choices": [{"delta": "a"}]},
        {"choices": [{"index": [], "text": "a"}]},
        {"choices": [{"text": "a", "finish_reason": 3}]},
        {"choices": ["a"]},
        {"choices": 3},
        {"choices": [], "usage": "7"},
        {"choices": [], "usage": {"completion_tokens": "7"}},
    ],
)
def test_an_answer_that_cannot_be_read(event: dict[str, Any]) -> None:
    with played(delta(content="a"), event) as place, OpenAIServer(place.url) as server:
        stream = server.chat(HELLO, PARAMS)
        assert next(stream).text == "a"
        with pytest.raises(PeerLost, match="unreadable answer"):
            next(stream)
        assert next(stream, None) is None


def test_a_cancel_ends_those_that_are_open() -> None:
    events = [delta(1, finish="stop", content="b"), delta(0, content="a"), delta(2, content="c")]
    with played(*events) as place, OpenAIServer(place.url) as server:
        stream = server.chat(HELLO, SamplingParams(n=3))
        first = next(stream)
        stream.cancel()
        ends = {c.index: c.finish_reason for c in stream if c.finish_reason}
    assert first.text == "b"
    assert ends == {0: "cancelled", 1: "stop", 2: "cancelled"}


def test_a_text_to_continue() -> None:
    event = {"choices": [{"index": 0, "text": "more", "finish_reason": "length"}], "usage": USAGE}
    with played(event) as place, OpenAIServer(place.url, limited=False) as server:
        got = list(server.stream("text", SamplingParams(max_tokens=40, seed=2)))
        (asked,) = place.asked
    assert [(c.text, c.finish_reason) for c in got] == [("more", None), ("", "length")]
    assert {"prompt": "text", "max_tokens": 40, "seed": 2, "model": "m"}.items() <= asked.items()
    assert "n" not in asked


def test_a_text_that_is_not_unicode_is_refused() -> None:
    with played() as place, OpenAIServer(place.url) as server:
        for ask in (
            lambda: server.stream("\udcff", PARAMS),
            lambda: server.chat([ChatMessage("user", "\udcff")], PARAMS),
        ):
            with pytest.raises(RequestError, match="not valid Unicode"):
                ask()
        assert place.asked == []


@pytest.mark.parametrize("number", [128, 200, 256])
def test_a_limit_is_sent_if_it_was_given_whatever_it_is(shm_dir: Path, number: int) -> None:
    frontend = PlayedFrontend(shm_dir, [Chunk(id="", finish_reason="stop", metrics=METRICS)])
    try:
        with gateway_before(frontend) as (_, place):
            for given in ([], ["--max-tokens", str(number)]):
                told = subprocess.run(
                    command("chat", "--url", place.url, *given),
                    input=b"hi\n",
                    timeout=60,
                    check=False,
                )
                assert told.returncode == 0
    finally:
        frontend.close()
    free, limited = frontend.submitted
    assert limited.params.max_tokens == number
    assert limited.must_fit  # a limit of the user's own
    assert not free.must_fit


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Pipeline]:
    with pipeline(tmp_path) as made:
        yield made


def test_what_the_server_refuses_is_its_own_words(held: Pipeline) -> None:
    with gateway_before(held) as (_, place), OpenAIServer(place.url + "/v1/", "model") as server:
        with pytest.raises(RequestError, match=r"the server answered: .*top_p") as caught:
            server.chat(HELLO, SamplingParams(top_p=7.0))
        assert caught.value.code == 400


def test_an_answer_that_breaks_off(held: Pipeline) -> None:
    with gateway_before(held) as (_, place), OpenAIServer(place.url) as server:

        def half() -> None:
            held.peer.send(TokensOut(held.peer.add().rid, byte_level().encode("half"), 0))

        answering = threading.Thread(target=half)
        answering.start()
        stream = server.chat(HELLO, SamplingParams(max_tokens=9))
        answering.join()
        assert next(stream).text == "half"
        held.stop()
        with pytest.raises(RequestError, match="pipeline stopped") as caught:
            next(stream)
        assert caught.value.code == 503
        assert next(iter(stream), None) is None


@pytest.mark.parametrize("url", ["", "here", "ftp://h", "http://", "http://h:x"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        OpenAIServer(url)


def test_nobody_there() -> None:
    with pytest.raises(PeerLost, match=r"http://127\.0\.0\.1:9/v1"):
        OpenAIServer("http://127.0.0.1:9")
