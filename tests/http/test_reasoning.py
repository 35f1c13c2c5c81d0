"""A model that thinks before it answers, through frontend, gateway and clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from ipc.messages.client import ChatMessage
from ipc.messages.requests import TokensOut
from ssd_pipe.cli.speculation import RESET
from ssd_pipe.cli.thinking import DIM
from ssd_pipe.client import Client
from ssd_pipe.openai_server import OpenAIServer
from ssd_pipe.params import SamplingParams
from ssd_pipe.server_stream import ServerChunk
from tests.cli.terminal import terminal
from tests.frontend_peer import TEMPLATE, Pipeline, pipeline
from tests.http.server import Server, gateway_before
from tests.text.vocabularies import byte_level

THINKING = TEMPLATE + "{% if begun %}<think>\n{% endif %}{# knows <think> and </think> #}"
BEGUN = {"begun": True}
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
WHOLE = ("<think>\n", "so", " they say\n</thi", "nk>\n\n", "yes", " <think>")
REST = WHOLE[1:]


@contextlib.contextmanager
def saying(run: Pipeline, *pieces: str) -> Iterator[None]:
    """The next request is answered with these, a message for each."""

    def answer() -> None:
        added = run.peer.add()
        for piece in pieces[:-1]:
            run.peer.send(TokensOut(added.rid, byte_level().encode(piece), 0))
        run.peer.send(TokensOut(added.rid, byte_level().encode(pieces[-1]), 0, "length"))

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pipeline, Server]]:
    folder: Path = tmp_path_factory.mktemp("thinking")
    with pipeline(folder, template=THINKING) as made, gateway_before(made) as (_, server):
        yield made, server


@pytest.fixture
def api(run: tuple[Pipeline, Server]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{run[1].url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.mark.parametrize(("pieces", "variables"), [(WHOLE, {}), (REST, BEGUN)])
def test_thoughts_and_answer_come_apart(
    run: tuple[Pipeline, Server],
    api: openai.OpenAI,
    pieces: Sequence[str],
    variables: dict[str, Any],
) -> None:
    asked: dict[str, Any] = {"model": "model", "messages": HELLO, "max_tokens": 40}
    asked["extra_body"] = {"chat_template_kwargs": variables}
    with saying(run[0], *pieces):
        message: Any = api.chat.completions.create(**asked).choices[0].message
    assert (message.reasoning_content, message.content) == ("so they say", "yes <think>")
    with saying(run[0], *pieces):
        chunks = list(api.chat.completions.create(**asked, stream=True))
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == "so they say"
    assert "".join(delta.content or "" for delta in deltas) == "yes <think>"
    asked["extra_body"] |= {"separate_reasoning": False}
    with saying(run[0], *pieces):
        message = api.chat.completions.create(**asked).choices[0].message
    assert message.content == "".join(pieces)
    assert not hasattr(message, "reasoning_content")


def test_an_answer_without_a_thought_has_none(
    run: tuple[Pipeline, Server], api: openai.OpenAI
) -> None:
    with saying(run[0], "yes"):
        message = api.chat.completions.create(model="model", messages=HELLO).choices[0].message
    assert message.content == "yes"
    assert not hasattr(message, "reasoning_content")


@pytest.mark.parametrize("variables", [{}, BEGUN])
def test_a_text_that_has_a_format_is_all_answer(
    run: tuple[Pipeline, Server], api: openai.OpenAI, variables: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"model": "model", "messages": HELLO, "max_tokens": 40}
    asked["response_format"] = {"type": "json_object"}
    asked["extra_body"] = {"chat_template_kwargs": variables}
    with saying(run[0], '{"a":', " 1}"):
        message: Any = api.chat.completions.create(**asked).choices[0].message
    assert message.content == '{"a": 1}'
    assert not hasattr(message, "reasoning_content")
    with saying(run[0], '{"a":', " 1}"):
        chunks = list(api.chat.completions.create(**asked, stream=True))
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == '{"a": 1}'
    assert not any(getattr(delta, "reasoning_content", None) for delta in deltas)


def test_a_thought_that_does_not_end_is_no_answer(
    run: tuple[Pipeline, Server], api: openai.OpenAI
) -> None:
    with saying(run[0], "<think>", "so </th"):
        choice = api.chat.completions.create(model="model", messages=HELLO).choices[0]
    message: Any = choice.message
    assert (message.reasoning_content, message.content) == ("so </th", "")
    assert choice.finish_reason == "length"


def test_texts_that_are_continued_are_left_as_they_are(
    run: tuple[Pipeline, Server], api: openai.OpenAI
) -> None:
    with saying(run[0], *WHOLE):
        told = api.completions.create(model="model", prompt="x", max_tokens=40)
    assert told.choices[0].text == "".join(WHOLE)


def test_a_client_is_told_where_the_thought_begins(run: tuple[Pipeline, Server]) -> None:
    params = SamplingParams(max_tokens=40)
    turns = [ChatMessage("user", "hi")]
    with Client(run[0].endpoint) as client:
        for pieces, variables, thinking in ((WHOLE, {}, False), (REST, BEGUN, True)):
            with saying(run[0], *pieces):
                chunks = list(client.chat(turns, params, chat_template_kwargs=variables))
            assert [chunk.thinking for chunk in chunks] == [thinking] + [None] * (len(chunks) - 1)
            assert "".join(chunk.text for chunk in chunks) == "".join(pieces)
        with saying(run[0], *WHOLE):
            assert all(chunk.thinking is None for chunk in client.stream("x", params))


def test_our_own_client_of_servers_takes_them_apart(run: tuple[Pipeline, Server]) -> None:
    params = SamplingParams(max_tokens=40)
    with OpenAIServer(run[1].url) as server, saying(run[0], *REST):
        chunks = list(server.chat([ChatMessage("user", "hi")], params, chat_template_kwargs=BEGUN))
    parts = [chunk for chunk in chunks if isinstance(chunk, ServerChunk)]
    assert "".join(chunk.reasoning for chunk in parts) == "so they say"
    assert "".join(chunk.text for chunk in parts) == "yes <think>"


def test_a_terminal_dims_a_thought_that_the_prompt_began(run: tuple[Pipeline, Server]) -> None:
    arguments = ["chat", "--endpoint", run[0].endpoint, "--chat-template-kwargs", '{"begun": true}']
    with terminal(*arguments) as screen, saying(run[0], "so</think>", "yes"):
        screen.until("> ")
        screen.type("hi\n")
        assert screen.until("yes").endswith(f"{DIM}so</think>{RESET}yes")
