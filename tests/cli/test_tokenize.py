"""``ssd-pipe tokenize`` with a folder's tokenizer and with a running pipeline's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from ssd_pipe.config_load import load
from ssd_pipe.supervisor import Supervisor
from tests.cli.conftest import Running
from tests.frontend_peer import model_folder
from tests.pipelines import byte_model, command
from tests.test_supervisor import Lines
from tests.text.vocabularies import byte_level

TEXT = "<s>hé, two\nlines"


def tokenize(*arguments: str, typed: str = "") -> tuple[int, str, str]:
    done = subprocess.run(
        command("tokenize", *arguments),
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    return str(model_folder(folder))


def row(text: str, rendered: bool = False) -> str:
    return " ".join(map(str, byte_level().encode(text, rendered))) + "\n"


def test_there_and_back(model: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text(TEXT + "\n")
    for arguments, typed in (([TEXT], ""), ([], TEXT), (["-"], TEXT), (["-f", str(file)], "")):
        assert tokenize("--model", model, *arguments, typed=typed) == (0, row(TEXT), "")
    ids = byte_level().encode(TEXT)
    for arguments, typed in (
        ([row(TEXT)], ""),
        ([], row(TEXT)),
        (list(map(str, ids)), ""),
        ([json.dumps(ids)], ""),
    ):
        assert tokenize("-m", model, "--decode", *arguments, typed=typed) == (0, TEXT + "\n", "")


def test_names_of_the_tokens(model: str) -> None:
    status, output, _ = tokenize("--model", model, "--json", "é")
    told = json.loads(output)
    backend = byte_level().backend
    ids = byte_level().encode("é")
    assert status == 0
    assert told == {
        "count": len(ids),
        "tokens": ids,
        "token_strs": [backend.id_to_token(i) for i in ids],
    }


def test_a_conversation_is_what_the_model_reads(model: str) -> None:
    options = ["--chat", "--system", "be", "--chat-template-kwargs", '{"thinking": true}']
    expected = row("<s>system: be\n<s>user: hi\n+", rendered=True)
    assert tokenize("--model", model, "hi", *options) == (0, expected, "")


def test_what_the_tokenizer_adds_by_itself_can_be_left_out(model: str) -> None:
    path = str(Path(model) / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    begin = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    backend.save(path)
    assert tokenize("--model", model, "a") == (0, f"{begin} {row('a')}", "")
    assert tokenize("--model", model, "--no-special", "a") == (0, row("a"), "")
    assert tokenize("--model", model, "--chat", "a") == (0, row("<s>user: a\n"), "")


def test_the_running_target_s_is_taken(running: Running) -> None:
    place = running.place
    told = tokenize(*place, "hello")
    assert told == tokenize("--model", running.supervisor.config.target.model, "hello")
    assert len(told[1].split()) == 5
    result = running.client.stream("hello", max_tokens=1).result()
    assert result.metrics is not None
    assert result.metrics.prompt_tokens == 5
    assert tokenize("--shm-dir", running.shm_dir, "hello") == told


def test_the_running_target_is_found_from_any_folder(
    shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokenize("hi", "--model", str(byte_model(tmp_path, "think")))
    monkeypatch.chdir(tmp_path)
    settings = {"mode": "ar", "target.model": "./think", "run.shm_dir": str(shm_dir)}
    supervisor = Supervisor(load(None, settings | {"run.log_dir": "logs"}), sink=Lines())
    try:
        supervisor.start()
        (tmp_path / "elsewhere" / "think").mkdir(parents=True)
        monkeypatch.chdir("elsewhere")
        assert tokenize("hi", "--shm-dir", str(shm_dir)) == expected
        assert (expected[0], len(expected[1].split())) == (0, 2)
        assert supervisor.log_dir.parent == tmp_path / "logs"
    finally:
        supervisor.stop()


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (["--decode", "1 x"], "--decode: must be token ids", 2),
        (["--decode", "1", "99999"], "--decode: 99999 is not the id of a token", 2),
        (["--decode", str(1 << 40)], "--decode: 1099511627776 is not the id of a token", 2),
        (["--decode", "--chat", "1"], "--decode: goes the other way", 2),
        (["a", "b"], "TEXT: must be one argument", 2),
        (["a", "--system", "s"], "--system: is for a chat template", 2),
        (["a", "--run", "r"], "--model: names a model", 2),
        (["a", "--file", "f"], "--file: is instead", 2),
        (["--chat", "a", "--chat-template-kwargs", '{"messages": 1}'], "--chat: ", 2),
        (["\udcff"], "TEXT: is not valid Unicode", 2),
        (["--chat", "a", "--system", "\udcff"], "--system: is not valid Unicode", 2),
    ],
)
def test_what_cannot_be_is_one_line(
    model: str, arguments: list[str], words: str, status: int
) -> None:
    code, output, errors = tokenize("--model", model, *arguments)
    assert (code, output) == (status, "")
    assert errors.startswith(f"error: {words}")
    assert errors.count("\n") == 1


def test_without_a_pipeline_a_model_must_be_named(shm_dir: Path) -> None:
    status, _, errors = tokenize("hi", "--shm-dir", str(shm_dir))
    assert status == 1
    assert errors.startswith("error: no pipeline whose tokenizer it could be")
    assert "name a --model" in errors
