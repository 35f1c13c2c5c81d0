"""``ssd-pipe generate``: where its prompt comes from, and what reaches the pipeline of its options.

The pipeline answers each prompt with the prompt itself (see ``frontend_peer.Echo``).
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ipc.messages.requests import Rejected, TokensOut
from ssd_pipe.params import SamplingParams
from tests.cli.conftest import Running
from tests.cli.terminal import plain, terminal
from tests.frontend_peer import Echo, Pipeline, pipeline
from tests.http.server import gateway_before
from tests.pipelines import command
from tests.text.vocabularies import byte_level

TIMEOUT = 60
Told = tuple[int, str, str]
Generate = Callable[..., Told]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Pipeline]:
    with pipeline(tmp_path) as made:
        made.echo = Echo(made.peer)
        yield made
        made.stop()
        made.echo.close()


@pytest.fixture
def generate(run: Pipeline) -> Generate:
    """Runs the command; returns its status, output and errors."""

    def run_it(*arguments: str, typed: bytes = b"") -> Told:
        done = subprocess.run(
            command("generate", "--endpoint", run.endpoint, *arguments),
            input=typed,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return run_it


@pytest.mark.parametrize(
    ("arguments", "typed", "answer"),
    [
        (["hi"], b"", "user: hi\n\n"),
        ([], b"hi\n", "user: hi\n\n"),
        (["-"], b"hi\n\n", "user: hi\n\n\n"),
        (["--raw"], "hé".encode(), "hé\n"),
        (["hi", "--system", "be"], b"", "system: be\nuser: hi\n\n"),
        (["hi", "--chat-template-kwargs", '{"thinking": true}'], b"", "user: hi\n+\n"),
    ],
)
def test_a_prompt_comes_from_the_command_line_or_from_input(
    generate: Generate, arguments: list[str], typed: bytes, answer: str
) -> None:
    assert generate(*arguments, typed=typed) == (0, answer, "")


def test_a_prompt_comes_from_a_file(generate: Generate, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("two\nlines\n", encoding="utf-8")
    for flag in ("-f", "--file"):
        assert generate("--raw", flag, str(file)) == (0, "two\nlines\n", "")


def test_several_prompts_have_headings(generate: Generate, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("c", encoding="utf-8")
    told = "==> a b <==\na\nb\n\n==> standard input <==\nhi\n"
    assert generate("--raw", "a\nb", "-", typed=b"hi") == (0, told, "")
    assert generate("--raw", "-q", "a", "b") == (0, "a\nb\n", "")
    files = ["--file", str(file), "-f", str(file)]
    told = f"==> {file} <==\nc\n\n==> {file} <==\nc\n"
    assert generate("--raw", *files) == (0, told, "")


def test_more_prompts_than_are_asked_at_once(generate: Generate) -> None:
    texts = [str(number) for number in range(150)]
    assert generate("--raw", "--quiet", *texts) == (0, "".join(f"{t}\n" for t in texts), "")


def test_prompts_that_do_not_fit_in_the_line_wait(tmp_path: Path) -> None:
    with pipeline(tmp_path) as run, ExitStack() as stack:
        process = subprocess.Popen(
            command("generate", "--raw", "--quiet", *"abcde", "--endpoint", run.endpoint),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        stack.callback(process.kill)
        first, second, *others = [run.peer.add() for _ in range(5)]
        for each in others:
            run.peer.send(Rejected(each.rid, 429, "the waiting line is full (1 requests)"))
        for each in (first, second):
            run.peer.send(TokensOut(each.rid, each.tokens, 0, "length"))
        again = [run.peer.add() for _ in others]
        assert [each.tokens for each in again] == [each.tokens for each in others]
        for each in again:
            run.peer.send(TokensOut(each.rid, each.tokens, 0, "length"))
        output, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, output, errors) == (0, b"a\nb\nc\nd\ne\n", b"")


def test_answers_as_json(generate: Generate) -> None:
    status, output, errors = generate("--raw", "--json", "hé", "x", "--max-tokens", "2")
    assert (status, errors) == (0, "")
    first, second = map(json.loads, output.splitlines())
    ids = byte_level().encode("hé")[:2]
    assert first["token_ids"] == ids
    assert first["text"] == byte_level().decode(ids)
    assert (first["prompt_index"], first["index"], first["finish_reason"]) == (0, 0, "length")
    assert first["metrics"]["output_tokens"] == 2
    assert first["metrics"]["prompt_tokens"] == len(byte_level().encode("hé"))
    assert 0 < first["metrics"]["time_to_first_token"] <= first["metrics"]["total_time"]
    assert (second["prompt_index"], second["text"]) == (1, "x")


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("asked", ["pipeline", "server"])
def test_n_answers_are_those_of_the_pipeline(running: Running, asked: str, raw: bool) -> None:
    place = running.place if asked == "pipeline" else ["--url", running.url]
    options = ["--max-tokens", "12", "--temperature", "1", "--seed", "3", "--n", "3", "--json"]
    done = subprocess.run(
        command("generate", "one", "two", *place, *options, *(["--raw"] if raw else [])),
        capture_output=True,
        timeout=TIMEOUT,
        check=True,
    )
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3)
    asking: Callable[..., Any] = running.client.stream if raw else running.client.chat
    results = [
        choice for text in ("one", "two") for choice in asking(text, params).result().choices
    ]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [a["text"] for a in answers] == [r.text for r in results]
    assert [a["finish_reason"] for a in answers] == [r.finish_reason for r in results]
    assert [(a["prompt_index"], a["index"]) for a in answers] == [
        (p, i) for p in (0, 1) for i in (0, 1, 2)
    ]
    told = [a["metrics"] for a in answers if a["metrics"]]
    assert sum(m["output_tokens"] for m in told) == sum(len(r.token_ids) for r in results)
    if asked == "pipeline":
        assert [tuple(a["token_ids"]) for a in answers] == [r.token_ids for r in results]
    else:
        assert len(told) == 2  # a server counts the answers to a prompt together
        assert not any("token_ids" in a for a in answers)


@pytest.mark.parametrize("asked", ["pipeline", "server"])
def test_a_terminal_is_told_why_an_answer_ended(run: Pipeline, asked: str) -> None:
    with ExitStack() as stack:
        place = ["--endpoint", run.endpoint]
        if asked == "server":
            _, server = stack.enter_context(gateway_before(run))
            place = ["--url", server.url, "--max-tokens", "9"]
        for options, end in (
            ([], "hi\n[length]\n"),
            (["-q"], "hi\n"),
            (["--json"], "}}\n"),
        ):
            with terminal("generate", "--raw", "hi", *place, *options) as screen:
                assert screen.end() == 0
                assert plain(screen.seen).endswith(end), options
        with terminal("generate", "--raw", "hi", *place, "--metrics") as screen:
            screen.until("hi\r\n[length] 2 prompt + 2 output tokens | ")
            assert screen.end() == 0


@pytest.mark.parametrize("asked", ["pipeline", "server"])
def test_ctrl_c_ends_all_answers(tmp_path: Path, asked: str) -> None:
    with ExitStack() as stack:
        run = stack.enter_context(pipeline(tmp_path))
        place = ["--endpoint", run.endpoint]
        if asked == "server":
            _, server = stack.enter_context(gateway_before(run))
            place = ["--url", server.url]
        process = subprocess.Popen(
            command("generate", "--raw", "--json", "1", "2", "3", "--max-tokens", "9", *place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        first = run.peer.add()
        # A server is asked for one answer after the other.
        others = [run.peer.add(), run.peer.add()] if asked == "pipeline" else []
        run.peer.send(TokensOut(first.rid, byte_level().encode("whole"), 0, "length"))
        assert json.loads(process.stdout.readline())["text"] == "whole"
        others = others or [run.peer.add()]
        process.send_signal(signal.SIGINT)
        assert {run.peer.abort().rid for _ in others} == {each.rid for each in others}
        output, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert errors == b""
    # None where the signal came between two answers, or before a server began to answer.
    ends = [json.loads(line)["finish_reason"] for line in output.splitlines()]
    assert ends in ([], ["cancelled"])


def test_sampling_options_reach_the_pipeline(run: Pipeline, generate: Generate) -> None:
    options = ["--repetition-penalty", "1.5", "--presence-penalty", "0.5"]
    options += ["--frequency-penalty", "-0.25", "--min-tokens", "2", "--top-k", "-1"]
    status, _, errors = generate("hi", *options, "--temperature", "0.5", "--seed", "4")
    assert (status, errors) == (0, "")
    key = run.echo.added.get(timeout=TIMEOUT).key
    assert (key.temperature, key.seed, key.top_k) == (0.5, 4, 0)
    processors = key.processors
    assert (processors.repetition_penalty, processors.min_tokens) == (1.5, 2)
    assert (processors.presence_penalty, processors.frequency_penalty) == (0.5, -0.25)


@pytest.mark.parametrize(
    ("arguments", "typed", "words"),
    [
        (["hi", "--file", "/x"], b"", "--file: is instead of a prompt on the command line"),
        (["--file", "/no/such"], b"", "--file: /no/such: No such file or directory"),
        ([], b"", "PROMPT: is empty"),
        ([], b"\xff", "PROMPT: is not UTF-8"),
        (["\udcff"], b"", "PROMPT: is not valid Unicode"),
        (["hi", "--system", "\udcff"], b"", "--system: is not valid Unicode"),
        (["hi", "--raw", "--system", "x"], b"", "--system: is for a chat template"),
        (
            ["hi", "--raw", "--chat-template-kwargs", "{}"],
            b"",
            "--chat-template-kwargs: is for a chat template",
        ),
        (["hi", "--chat-template-kwargs", "{"], b"", "--chat-template-kwargs: must be a JSON"),
        (["hi", "--chat-template-kwargs", "[1]"], b"", "--chat-template-kwargs: must be a JSON"),
        (["hi", "--presence-penalty", "3"], b"", "--presence-penalty: must be in [-2, 2]"),
        (["hi", "--n", "0"], b"", "--n: must be"),
        (["hi", ""], b"", "PROMPT: is empty"),
        (["-", "-"], b"hi", "PROMPT: standard input can be read once"),
        (["hi", "-q", "--metrics"], b"", "--quiet: leaves out what --metrics asks for"),
        (["hi", "--url", "http://h"], b"", "--url: names a server"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_one_line(
    generate: Generate, arguments: list[str], typed: bytes, words: str
) -> None:
    status, output, errors = generate(*arguments, typed=typed)
    assert (status, output) == (2, "")
    assert errors.startswith(f"error: {words}")
    assert errors.count("\n") == 1


def with_input(redirection: str, *arguments: str) -> Told:
    """Runs the program as a shell does with such a redirection."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command(*arguments)],
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "PROMPT: none is given"),
        (["generate", "-"], "PROMPT: none is given"),
        (["chat"], "standard input: is closed"),
    ],
)
def test_a_closed_input_is_no_prompt(arguments: list[str], words: str) -> None:
    status, output, errors = with_input("<&-", *arguments, "--endpoint", "ipc:///nowhere")
    assert (status, output) == (2, "")
    assert errors.startswith(f"error: {words}")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("program", ["generate", "chat"])
def test_an_input_that_cannot_be_read_is_one_line(run: Pipeline, program: str) -> None:
    told = with_input("0>/dev/null", program, "--endpoint", run.endpoint)
    assert told == (2, "", "error: standard input: cannot be read: Bad file descriptor\n")


@pytest.mark.parametrize("arguments", [["generate", "-"], ["chat"]])
def test_an_input_that_fails_is_one_line(run: Pipeline, arguments: list[str]) -> None:
    ours, theirs = pty.openpty()
    os.close(theirs)  # whoever reads from ours now gets EIO
    done = subprocess.run(
        command(*arguments, "--endpoint", run.endpoint),
        stdin=ours,
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    os.close(ours)
    assert (done.returncode, done.stderr) == (
        2,
        b"error: standard input: cannot be read: Input/output error\n",
    )


def test_a_prompt_that_is_given_needs_no_input(run: Pipeline, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hi", encoding="utf-8")
    for arguments in (["hi"], ["--file", str(file)]):
        told = with_input("<&-", "generate", "--endpoint", run.endpoint, *arguments)
        assert told == (0, "user: hi\n\n", "")


def test_without_a_prompt_a_terminal_is_told_what_to_give() -> None:
    with terminal("generate", "--endpoint", "ipc:///nowhere") as screen:
        screen.until("error: PROMPT: none is given")
        assert screen.end() == 2
