"""``ssd-pipe generate``: where its prompt comes from, and what reaches the pipeline of its options.

The pipeline answers each prompt with the prompt itself (see ``frontend_peer.Echo``).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import terminal
from tests.frontend_peer import Echo, Pipeline, pipeline
from tests.pipelines import command

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
        (["hi", "--raw", "--system", "x"], b"", "--system: is for a chat template"),
        (
            ["hi", "--raw", "--chat-template-kwargs", "{}"],
            b"",
            "--chat-template-kwargs: is for a chat template",
        ),
        (["hi", "--chat-template-kwargs", "{"], b"", "--chat-template-kwargs: must be a JSON"),
        (["hi", "--chat-template-kwargs", "[1]"], b"", "--chat-template-kwargs: must be a JSON"),
        (["hi", "--presence-penalty", "3"], b"", "--presence-penalty: must be in [-2, 2]"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_one_line(
    generate: Generate, arguments: list[str], typed: bytes, words: str
) -> None:
    status, output, errors = generate(*arguments, typed=typed)
    assert (status, output) == (2, "")
    assert errors.startswith(f"error: {words}")
    assert errors.count("\n") == 1


def without_input(*arguments: str) -> Told:
    """Runs the program as a shell does with ``<&-``."""
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command(*arguments)],
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
    status, output, errors = without_input(*arguments, "--endpoint", "ipc:///nowhere")
    assert (status, output) == (2, "")
    assert errors.startswith(f"error: {words}")
    assert errors.count("\n") == 1


def test_a_prompt_that_is_given_needs_no_input(run: Pipeline, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hi", encoding="utf-8")
    for arguments in (["hi"], ["--file", str(file)]):
        told = without_input("generate", "--endpoint", run.endpoint, *arguments)
        assert told == (0, "user: hi\n\n", "")


def test_without_a_prompt_a_terminal_is_told_what_to_give() -> None:
    with terminal("generate", "--endpoint", "ipc:///nowhere") as screen:
        screen.until("error: PROMPT: none is given")
        assert screen.end() == 2
