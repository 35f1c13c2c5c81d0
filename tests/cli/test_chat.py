"""``ssd-pipe chat`` with a pipeline and with an OpenAI-compatible server: ours."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ipc.messages.client import ChatMessage, Chunk
from ipc.messages.requests import TokensOut
from ssd_pipe.cli.speculation import ACCEPTED, BONUS, RECOVERY, RESET, coloured
from ssd_pipe.cli.thinking import DIM
from ssd_pipe.params import SamplingParams
from tests.cli.conftest import Running
from tests.cli.terminal import Terminal, plain, terminal
from tests.frontend_peer import Pipeline, pipeline
from tests.http.played_server import delta, played
from tests.http.server import gateway_before
from tests.pipelines import command
from tests.text.vocabularies import byte_level

TIMEOUT = 60
LENGTH = ["--max-tokens", "24", "--ignore-eos"]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def chat(
    arguments: list[str], typed: str, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command("chat", *LENGTH, *arguments),
        input=typed.encode(),
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture(params=["pipeline", "server"])
def place(request: pytest.FixtureRequest, running: Running) -> list[str]:
    """Options that name who answers: the pipeline, or its gateway."""
    return running.place if request.param == "pipeline" else ["--url", running.url]


def said(running: Running, *turns: str, system: str = "") -> str:
    """What the pipeline answers to turns of user, assistant, user ..."""
    messages = [ChatMessage("system", system)] if system else []
    roles = ("user", "assistant")
    messages += [ChatMessage(roles[i % 2], text) for i, text in enumerate(turns)]
    return running.client.chat(messages, PARAMS).result().text


def test_a_conversation_keeps_its_history(running: Running, place: list[str]) -> None:
    done = chat([*place, "--metrics"], "one\ntwo\n")
    assert done.returncode == 0, done.stderr
    first = said(running, "one")
    second = said(running, "one", first, "two")
    assert done.stdout.decode() == f"{first}\n{second}\n"
    errors = done.stderr.decode()
    counts = re.findall(r"^\[length\] (\d+) prompt \+ 24 output tokens", errors, re.MULTILINE)
    assert len(counts) == 2
    assert int(counts[1]) > int(counts[0]) + 24
    told = re.findall(r"cache hit rate \d\.\d\d \| mean accepted length \d\.\d\d", errors)
    assert len(told) == (0 if "--url" in place else 2)


def test_reset_forgets_and_system_sets(running: Running, place: list[str]) -> None:
    typed = "one\n/reset\ntwo\n/system be brief\n/clear\ntwo\n/system\n/exit\nnever read\n"
    done = chat(place, typed)
    assert done.returncode == 0, done.stderr
    answers = [said(running, text) for text in ("one", "two")]
    answers += [said(running, "two", system="be brief"), "be brief"]
    assert done.stdout.decode() == "".join(f"{answer}\n" for answer in answers)


def test_variables_reach_the_chat_template(running: Running, place: list[str]) -> None:
    done = chat([*place, "--chat-template-kwargs", '{"thinking": true}'], "one\n")
    assert done.returncode == 0, done.stderr
    variables = {"thinking": True}
    thinking = running.client.chat("one", PARAMS, chat_template_kwargs=variables).result().text
    assert done.stdout.decode() == f"{thinking}\n"
    assert thinking != said(running, "one")


def test_messages_of_several_lines(running: Running) -> None:
    done = chat(running.place, 'a \\\nb\n/reset\n"""a\nb\n\nc"""\n/reset\n"""\nlast\n')
    answers = [said(running, text) for text in ("a \nb", "a\nb\n\nc", "last")]
    assert done.stdout.decode() == "".join(f"{answer}\n" for answer in answers)


def test_a_mistake_ends_nothing(running: Running, place: list[str]) -> None:
    done = chat(place, f"{'x' * 600}\n/rest\none\n")
    assert done.returncode == 1
    assert done.stdout.decode() == said(running, "one") + "\n"
    too_long, unknown = done.stderr.decode().splitlines()
    assert too_long.startswith("error: ")
    assert "512" in too_long
    assert unknown == "error: no command /rest; /help lists them"


def test_colours_show_what_the_draft_gave(running: Running) -> None:
    with terminal("chat", *running.place, *LENGTH, "--show-speculation") as screen:
        screen.until("bonus token")
        screen.until("> ")
        screen.type("one\n")
        screen.until("one\r\n")
        answer = screen.until("> ")
        screen.type("/exit\n")
        assert screen.end() == 0
    assert ACCEPTED in answer
    assert RECOVERY in answer or BONUS in answer
    assert shown(answer) == said(running, "one")


def shown(answer: str) -> str:
    """What stands on the screen between the line typed and the next prompt."""
    return plain(answer).removeprefix("\r").removesuffix("> ").removesuffix("\n")


def test_no_colours_where_they_are_not_wanted(running: Running) -> None:
    with terminal("chat", *running.place, *LENGTH, "--show-speculation", NO_COLOR="1") as screen:
        screen.until("> ")
        screen.type("one\n")
        screen.until("one\r\n")
        answer = screen.until("> ")
    assert not any(colour in answer for colour in (ACCEPTED, RECOVERY, BONUS))
    assert shown(answer) == said(running, "one")
    done = chat([*running.place, "--show-speculation"], "one\n")
    assert done.returncode == 0
    assert done.stdout.decode() == said(running, "one") + "\n"


def test_chunks_tell_what_came_of_each_chain(running: Running) -> None:
    chunks = list(running.client.chat([ChatMessage("user", "one")], PARAMS))
    metrics = chunks[-1].metrics
    assert metrics is not None
    assert sum(c.drafted for c in chunks) == metrics.drafted_tokens > 0
    last = chunks[-1]
    assert sum(c.accepted for c in chunks) <= metrics.accepted_tokens
    assert sum(c.accepted for c in chunks[:-1]) >= metrics.accepted_tokens - last.drafted
    assert all(c.accepted <= min(c.drafted, len(c.token_ids)) for c in chunks)
    assert chunks[0].drafted == 0  # the token that the prompt gave
    assert all(c.accepted_text <= len(c.text) for c in chunks)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((2, 5, 2), f"{ACCEPTED}ab{RESET}{RECOVERY}c{RESET}"),
        ((2, 2, 2), f"{ACCEPTED}ab{RESET}{BONUS}c{RESET}"),
        ((2, 5, 1), f"{ACCEPTED}a{RESET}{RECOVERY}bc{RESET}"),
        ((3, 5, 3), f"{ACCEPTED}abc{RESET}"),
        ((0, 5, 0), f"{RECOVERY}abc{RESET}"),
        ((0, 0, 0), "abc"),
    ],
)
def test_colours_of_one_chunk(counts: tuple[int, int, int], expected: str) -> None:
    accepted, drafted, text = counts
    chunk = Chunk(
        id="",
        text="abc",
        token_ids=(7, 8, 9),
        accepted=accepted,
        drafted=drafted,
        accepted_text=text,
    )
    assert coloured(chunk) == expected


def test_what_a_server_says_the_model_thought_is_dimmed() -> None:
    events = [delta(reasoning_content="hm"), delta(content="so"), delta(finish="stop")]
    with played(*events) as server:
        with terminal("chat", "--url", server.url) as screen:
            for _ in range(2):
                screen.until("> ")
                screen.type("one\n")
                screen.until("one\r\n")
                assert screen.until("so\r\n").endswith(f"{DIM}hm{RESET}\r\n\r\nso\r\n")
        with terminal("chat", "--url", server.url, NO_COLOR="1") as screen:
            screen.type("one\n")
            assert screen.until("so\r\n").endswith("<think>\r\nhm\r\n</think>\r\n\r\nso\r\n")
        assert chat(["--url", server.url], "one\n").stdout == b"so\n"
        again = [message["content"] for message in server.asked[1]["messages"]]
    assert again == ["one", "so", "one"]  # thoughts are no part of the conversation


class Held:
    """A chat on a terminal whose answers a test gives, token by token."""

    def __init__(self, screen: Terminal, run: Pipeline) -> None:
        self.screen = screen
        self.run = run


@pytest.fixture(params=["pipeline", "server"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Held]:
    with ExitStack() as stack:
        run = stack.enter_context(pipeline(tmp_path))
        place = ["--endpoint", run.endpoint]
        if request.param == "server":
            _, server = stack.enter_context(gateway_before(run))
            place = ["--url", server.url]
        yield Held(stack.enter_context(terminal("chat", *place)), run)


def test_ctrl_c_stops_the_answer_and_not_the_chat(held: Held) -> None:
    screen, peer = held.screen, held.run.peer
    screen.until("> ")
    screen.type("one\n")
    added = peer.add()
    peer.send(TokensOut(added.rid, byte_level().encode("half"), 0))
    screen.until("half")
    screen.interrupt()
    assert peer.abort().rid == added.rid
    screen.until("> ")
    screen.type("dropped")
    screen.until("dropped")
    screen.interrupt_until("> ")
    screen.type("two\n")
    again = peer.add()
    assert len(again.tokens) > len(added.tokens)  # what was said of the first answer is kept
    peer.send(TokensOut(again.rid, byte_level().encode("whole"), 0, "length"))
    screen.until("whole")
    screen.until("> ")
    screen.type("/exit\n")
    assert screen.end() == 0


def test_ctrl_c_before_the_first_token(held: Held) -> None:
    screen, peer = held.screen, held.run.peer
    screen.until("> ")
    screen.type("one\n")
    added = peer.add()
    screen.interrupt()
    assert peer.abort().rid == added.rid
    screen.until("> ")
    screen.type("/exit\n")
    assert screen.end() == 0


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (["--url", "here"], "--url: must look like http://", 2),
        (["--url", "http://127.0.0.1:9/v1"], "http://127.0.0.1:9/v1", 1),
        (["--url", "http://h", "--run", "r"], "--url: names a server", 2),
        (["--url", "http://h", "--show-speculation"], "--show-speculation", 2),
        (["--model", "m"], "--model: is for a server", 2),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], words: str, status: int) -> None:
    done = chat(arguments, "")
    assert done.returncode == status
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_a_message_that_is_refused_shows_in_the_status_of_piped_input(tmp_path: Path) -> None:
    with pipeline(tmp_path) as run:
        done = chat(["--endpoint", run.endpoint], f"{'x' * 100}\n/exit\n")
        assert (done.returncode, done.stdout) == (1, b"")
        assert b"error: messages: " in done.stderr
        with terminal("chat", "--endpoint", run.endpoint) as screen:
            screen.until("> ")
            screen.type("x" * 100 + "\n")
            screen.until("error: messages: ")
            screen.until("> ")
            screen.type("/exit\n")
            assert screen.end() == 0


def test_a_server_that_wants_a_key(tmp_path: Path) -> None:
    with pipeline(tmp_path) as run, gateway_before(run, api_key="sesame") as (_, server):
        done = chat(["--url", server.url, "--api-key", "wrong"], "")
        assert done.returncode == 1
        assert b"error: the server answered: " in done.stderr
        done = chat(["--url", server.url], "/exit\n", SSD_API_KEY="sesame")
        assert done.returncode == 0, done.stderr
