"""What every client of OpenAI-compatible servers makes of what they send: all three alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from bench.load.clients import OpenAIClient, Sample
from bench.prompts import Prompt
from bench.servers.completions import Completions
from ssd_pipe.errors import ConfigError, SsdPipeError
from ssd_pipe.openai_api import api_url
from ssd_pipe.openai_server import OpenAIServer
from ssd_pipe.params import SamplingParams
from ssd_pipe.text.tokenizer import Tokenizer
from tests.http.played_server import played
from tests.pipelines import byte_model

PARAMS = SamplingParams(max_tokens=9)
PIECES = ["a\u2028b\u2029", "\x85c\x0b", "データ"]
USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_model(tmp_path_factory.mktemp("models"), "target"))


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": piece, "finish_reason": finish}]}


def chatting(url: str, tokenizer: Tokenizer) -> tuple[int, str]:
    with OpenAIServer(url, "m") as server:
        got = list(server.stream("x", PARAMS))
    return sum(bool(chunk.text) for chunk in got), got[-1].finish_reason or ""


def comparing(url: str, tokenizer: Tokenizer) -> tuple[int, str]:
    client = Completions(url, "m", "", tokenizer)
    try:
        answer = client.generate([1], PARAMS)
    finally:
        client.close()
    assert tokenizer.decode(answer.tokens) == "".join(PIECES)
    return len(answer.arrivals), answer.finish


def loading(url: str, tokenizer: Tokenizer) -> tuple[int, str]:
    async def drive() -> Sample:
        sample = Sample(prompt="x", due=time.monotonic())
        async with OpenAIClient(url, "m") as client:
            await client.answer(Prompt(id="x", kind="plain", text="x"), PARAMS, sample)
        return sample

    sample = asyncio.run(drive())
    if sample.error:
        raise SsdPipeError(sample.error)
    assert (sample.prompt_tokens, sample.output_tokens) == (4, 3)
    return len(sample.arrivals), sample.finish


Ask = Callable[[str, Tokenizer], tuple[int, str]]
clients = pytest.mark.parametrize("ask", [chatting, comparing, loading])


@clients
@pytest.mark.parametrize(
    "form",
    ["data: {}\n\n", "data:{}\n\n", "data: {}\r\n\r\n", ": ping\n\nevent: x\nid: 3\ndata: {}\n\n"],
)
def test_events_in_every_form_with_any_character(ask: Ask, form: str, tokenizer: Tokenizer) -> None:
    events = [*map(text, PIECES), text("", "length"), USAGE]
    with played(*events, form=form) as place:
        assert ask(place.url, tokenizer) == (len(PIECES), "length")


@clients
@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"message": "too hot"}, "too hot"),
        ("too hot", "too hot"),
        ({"code": 500}, '{"code": 500}'),
        ({"message": None, "code": 3}, '{"message": null, "code": 3}'),
        (7, "7"),
    ],
)
def test_an_error_among_the_events(ask: Ask, error: Any, words: str, tokenizer: Tokenizer) -> None:
    with played(text("a"), {"error": error}) as place, pytest.raises(SsdPipeError) as caught:
        ask(place.url, tokenizer)
    assert str(caught.value) == f"the server answered: {words}"


@clients
@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ('{"error": {"message": "too long"}}', "too long"),
        ('{"error": {"code": 4}}', '{"code": 4}'),
        ('{"error": {}}', '{"error": {}}'),
        ('{"message": "too long"}', "too long"),
        ('{"detail": [{"loc": ["seed"]}]}', '{"detail": [{"loc": ["seed"]}]}'),
        ("no such model\n", "no such model"),
        ("<html><title>no</title></html>", "I'm a Teapot"),
        ("", "I'm a Teapot"),
    ],
)
def test_what_is_refused(ask: Ask, refusal: str, words: str, tokenizer: Tokenizer) -> None:
    refusing = {"refused": ["model"], "status": 418, "refusal": refusal}
    with played(**refusing) as place, pytest.raises(SsdPipeError) as caught:
        ask(place.url, tokenizer)
    assert str(caught.value) == f"the server answered: {words}"


@clients
@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([text("a")], "the answer broke off"),
        ([text("a"), "{"], "unreadable answer: "),
        ([{"choices": 3}], "unreadable answer: "),
    ],
)
def test_an_answer_that_is_none(
    ask: Ask, events: list[Any], words: str, tokenizer: Tokenizer
) -> None:
    with (
        played(*events, whole=False) as place,
        pytest.raises(SsdPipeError, match=f"{place.url}/completions: {words}"),
    ):
        ask(place.url, tokenizer)


@clients
def test_an_end_without_done_is_one(ask: Ask, tokenizer: Tokenizer) -> None:
    with played(*map(text, PIECES), text("", "stop"), USAGE, whole=False) as place:
        assert ask(place.url, tokenizer) == (len(PIECES), "stop")


@clients
def test_nobody_there(ask: Ask, tokenizer: Tokenizer) -> None:
    with pytest.raises(SsdPipeError, match=r"http://127\.0\.0\.1:9/v1: "):
        ask("http://127.0.0.1:9", tokenizer)


@pytest.mark.parametrize(
    ("url", "api"),
    [
        ("http://h", "http://h/v1"),
        ("http://h:8/", "http://h:8/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("http://[::1]:8/a/v3", "http://[::1]:8/a/v3"),
    ],
)
def test_where_the_api_is(url: str, api: str) -> None:
    assert api_url(url) == api


def test_a_url_that_is_none_names_its_option() -> None:
    with pytest.raises(ConfigError, match=r"--server: must look like http://HOST:PORT/v1, got 'h'"):
        api_url("h", "--server")
