"""The command line as a user meets it: real processes, error lines, exit statuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ipc.rundir import RunDir, list_runs
from tests.pipelines import byte_model, command, shm_dir

__all__ = ["shm_dir"]

TIMEOUT = 60


def ssd_pipe(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def error_line(done: subprocess.CompletedProcess[str], status: int) -> str:
    """The one line of stderr of a failed command."""
    assert done.returncode == status, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("models"), "target")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "speculation.kk=3"], "speculation.kk: unknown setting"),
        (["--set", "speculation.k"], "--set: must look like section.key=value"),
        (["--k", "99"], "speculation.k: must be 1..32, got 99"),
        (["--k", "many"], "'--k'"),
        (["--fan-out", "1,2"], "speculation.fan_out: a list needs k + 1 = 6 counts, got 2"),
        (["--fan-out", "100"], "speculation.fan_out: each count must be 0..64"),
        (["--fan-out", "a"], "speculation.fan_out: a number or a comma-separated list"),
        (["--fan-out-miss", "0"], "speculation.fan_out_miss: branches in all must be 1..256"),
        (["--mode", "turbo"], "turbo"),
        (["--config", "/nonexistent.toml"], "/nonexistent.toml: no such file"),
        (["--endpoint", "here"], "run.endpoint: must be tcp://HOST:PORT"),
        (["--log-level", "loud"], "run.log_level"),
        (["--no-such-option"], "--no-such-option"),
        (["--set", "target.cpus=[4095]"], "target.cpus: core 4095 is not available"),
    ],
)
def test_up_refuses_a_wrong_setting_in_one_line(arguments: list[str], words: str) -> None:
    assert words in error_line(ssd_pipe("up", "--no-pull", *arguments), 2)


def test_up_names_a_model_that_is_not_there(shm_dir: Path) -> None:
    line = error_line(ssd_pipe("up", "--no-pull", "--target", "./nothing-here"), 1)
    assert "nothing-here" in line


def test_up_refuses_a_draft_with_another_vocabulary(
    model: Path, tmp_path: Path, shm_dir: Path
) -> None:
    draft = byte_model(tmp_path, "draft", vocab_size=300)
    arguments = ["--target", str(model), "--draft", str(draft), "--set", f"run.shm_dir={shm_dir}"]
    line = error_line(ssd_pipe("up", *arguments), 2)
    assert "draft.model" in line
    assert "300" in line
    assert "259" in line
    assert list_runs(shm_dir) == []


def test_up_refuses_weights_that_are_missing_or_cut_short(tmp_path: Path, shm_dir: Path) -> None:
    model = byte_model(tmp_path, "target")
    weights = model / "model.safetensors"
    arguments = ["up", "--mode", "ar", "--target", str(model), "--set", f"run.shm_dir={shm_dir}"]
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 100)
    assert "model.safetensors: cut short" in error_line(ssd_pipe(*arguments), 1)
    weights.write_bytes(b"not weights at all")
    assert "model.safetensors: not a safetensors file" in error_line(ssd_pipe(*arguments), 1)
    weights.unlink()
    assert "model.safetensors" in error_line(ssd_pipe(*arguments), 1)


def test_up_refuses_a_length_the_model_does_not_have(model: Path, shm_dir: Path) -> None:
    place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
    assert "scheduler.max_model_len" in error_line(
        ssd_pipe("up", *place, "--max-model-len", "9999"), 2
    )


def test_up_refuses_a_port_in_use(model: Path, shm_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
        line = error_line(ssd_pipe("up", *place, "--endpoint", endpoint), 1)
    assert endpoint in line
    assert "in use" in line
    assert list_runs(shm_dir) == []


def test_up_refuses_a_run_directory_in_use(model: Path, shm_dir: Path) -> None:
    place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
    with RunDir.create(shm_dir, "taken"):
        line = error_line(ssd_pipe("up", *place, "--run", "taken"), 1)
    assert "taken" in line
    assert "in use" in line


def test_up_names_the_shared_memory_it_needs(tmp_path: Path, shm_dir: Path) -> None:
    """The hand-over of the rejection rule, for a vocabulary too large for any machine."""
    big = byte_model(tmp_path, "big")
    config = json.loads((big / "config.json").read_text())
    (big / "config.json").write_text(json.dumps(config | {"vocab_size": 2**34}))
    pair = ["--target", str(big), "--draft", str(big), "--set", f"run.shm_dir={shm_dir}"]
    line = error_line(ssd_pipe("up", "--rule", "rejection", *pair), 1)
    assert "not enough shared memory: 5242" in line  # 8 sequences * 2 * k 5 * 2**34 * 4 bytes
    assert "MiB needed" in line
    assert list_runs(shm_dir) == []


def test_a_process_that_is_no_part_of_the_run_is_refused(model: Path, shm_dir: Path) -> None:
    place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
    assert "'ar' has no draft" in error_line(ssd_pipe("run", "draft", *place), 2)
    assert "ranks 0..0, got 1" in error_line(ssd_pipe("run", "target", "--rank", "1", *place), 2)
    assert "proxy" in error_line(ssd_pipe("run", "proxy", *place), 2)


def test_joining_a_run_with_another_configuration_is_refused(model: Path, shm_dir: Path) -> None:
    place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
    with RunDir.create(shm_dir, "mine") as run_dir:
        error_line(ssd_pipe("run", "draft", *place, "--run", "mine"), 2)  # leaves its config there
        assert run_dir.config.exists()
        line = error_line(ssd_pipe("run", "target", *place, "--run", "mine", "--k", "3"), 2)
    assert "mine" in line
    assert "another configuration" in line


def test_commands_without_a_pipeline_say_so(shm_dir: Path) -> None:
    for arguments in (["status"], ["generate", "hello"]):
        line = error_line(ssd_pipe(*arguments, "--run", "no-such-run"), 1)
        assert "no-such-run" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "0"], "max_tokens: must be at least 1"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--stop", ""], "stop"),
    ],
)
def test_a_wrong_sampling_option_is_named(arguments: list[str], words: str) -> None:
    assert words in error_line(ssd_pipe("generate", "hello", *arguments), 1)


def test_pull_of_nonsense_is_one_line() -> None:
    assert "no such folder" in error_line(ssd_pipe("pull", "./nothing"), 1)


def test_debug_shows_the_traceback() -> None:
    done = ssd_pipe("up", "--k", "99", SSD_DEBUG="1")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_help_lists_the_commands() -> None:
    done = ssd_pipe("--help")
    assert done.returncode == 0
    for name in ("up", "run", "demo", "generate", "chat", "pull", "status", "doctor", "bench"):
        assert name in done.stdout


def test_light_commands_import_no_torch() -> None:
    script = (
        "import sys\n"
        "from ssd_pipe.cli.main import main\n"
        "try: main(['status', '--run', 'no-such-run'])\n"
        "except SystemExit: pass\n"
        "import ssd_pipe.supervisor\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_doctor_reports_as_json(shm_dir: Path) -> None:
    done = ssd_pipe("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["machine"]["cores_here"] == len(os.sched_getaffinity(0))
    assert report["shared_memory"]["folder"] == "/dev/shm"
    assert set(report["transports"]) == {"shm", "zmq"}
    assert "smollm2-draft-16m" in report["models"]


def test_doctor_prints_a_table() -> None:
    done = ssd_pipe("doctor")
    assert done.returncode == 0, done.stderr
    assert "cores here" in done.stdout
    assert "smollm2-135m-instruct" in done.stdout
