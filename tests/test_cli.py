"""The command line as a user meets it: real processes, error lines, exit statuses."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import httpx
import msgspec
import pytest
import typer
from rich.console import Console

from ipc.messages.client import Chunk, StatusReply
from ipc.rundir import RunDir, list_runs
from ssd_pipe import __version__
from ssd_pipe.cli.main import main
from ssd_pipe.cli.options import ConfigSource, config_options
from ssd_pipe.cli.server_choice import key_for
from ssd_pipe.cli.status import print_status
from ssd_pipe.cli.talk import show
from ssd_pipe.client import Stream
from ssd_pipe.config_load import load
from ssd_pipe.doctor import Report, render
from ssd_pipe.errors import PeerLost
from ssd_pipe.gateway_address import usable_endpoint
from ssd_pipe.preflight import tokenizer_mismatch
from ssd_pipe.runs import list_pipelines
from ssd_pipe.threads import has_gpu
from tests.cli.scripted import Scripted
from tests.pipelines import byte_model, command
from tests.waiting import wait_for

TIMEOUT = 60
Refused = Callable[..., str]


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


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """Run a command line that must fail with one line on stderr; returns that line."""

    def run(*arguments: str, status: int) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        lines = capfd.readouterr().err.strip().splitlines()
        assert caught.value.code == status, lines
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        return lines[0]

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("models"), "target")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "speculation.kk=3"], "speculation.kk: unknown setting"),
        (["--set", "foo.bar=1"], "foo.bar: unknown setting"),
        (["--set", "speculation.k"], "--set: must look like section.key=value"),
        (["--k", "99"], "speculation.k: must be 1..32, got 99"),
        (["--k", "many"], "'--k'"),
        (["--fan-out", "1,2"], "speculation.fan_out: a list needs k + 1 = 6 counts, got 2"),
        (["--fan-out", "100"], "speculation.fan_out: each count must be 0..64"),
        (["--fan-out", "a"], "speculation.fan_out: a number or a comma-separated list"),
        (["--fan-out-miss", "0"], "speculation.fan_out_miss: branches in all must be 1..256"),
        (["--mode", "turbo"], "turbo"),
        (["--config", "/nonexistent.toml"], "/nonexistent.toml: no such file"),
        (["--config", "a.toml", "--config", "b.toml"], "--config: takes one file, got a.toml, b"),
        (["--set", "mode=fast"], "mode: must be one of ar, sd, ssd, got 'fast'"),
        (["--set", "target.dtype=int8"], "target.dtype: must be one of auto, float32, bfloat16"),
        (["--set", "gateway.api_key="], "gateway.api_key: is empty"),
        (["--api-key", ""], "gateway.api_key: is empty"),
        (["--endpoint", "here"], "run.endpoint: must be tcp://HOST:PORT"),
        (["--log-level", "loud"], "'debug', 'info', 'warning', 'error'"),
        (["--load-format", "x"], "'auto', 'safetensors', 'dummy'"),
        (["--no-such-option"], "--no-such-option"),
        (["--set", "target.cpus=[4095]"], "target.cpus: core 4095 is not available"),
        (["--synthetic-acceptance", "2"], "speculation.synthetic_acceptance: a rate must be 0..1"),
        (["--synthetic-acceptance", "/nofile"], "neither a rate nor a file: /nofile"),
    ],
)
def test_up_refuses_a_wrong_setting_in_one_line(
    arguments: list[str], words: str, refused: Refused
) -> None:
    assert words in refused("up", "--no-pull", *arguments, status=2)


@pytest.mark.skipif(has_gpu(), reason="needs a machine without a GPU")
def test_up_refuses_a_gpu_that_is_not_there(refused: Refused) -> None:
    line = refused("up", "--no-pull", "--set", "draft.device=cuda", status=2)
    assert line == "error: draft.device: 'cuda', but there is no GPU here"


def test_up_names_a_model_that_is_not_there(shm_dir: Path, refused: Refused) -> None:
    line = refused("up", "--no-pull", "--target", "./nothing-here", status=1)
    assert "nothing-here" in line


def test_up_refuses_a_draft_with_another_vocabulary(
    model: Path, tmp_path: Path, shm_dir: Path, refused: Refused
) -> None:
    draft = byte_model(tmp_path, "draft", vocab_size=300)
    arguments = ["--target", str(model), "--draft", str(draft), "--set", f"run.shm_dir={shm_dir}"]
    line = refused("up", *arguments, status=2)
    assert "draft.model" in line
    assert "300" in line
    assert "259" in line
    assert list_runs(shm_dir) == []


def test_a_draft_with_another_tokenizer_of_the_same_size_is_noticed(
    model: Path, tmp_path: Path
) -> None:
    draft = byte_model(tmp_path, "draft")
    config = load(None, {"target.model": str(model), "draft.model": str(draft)})
    assert tokenizer_mismatch(config) == ""
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    assert str(draft) in tokenizer_mismatch(config)
    path.unlink()
    assert tokenizer_mismatch(config) == ""


def test_up_refuses_weights_that_are_missing_or_cut_short(
    tmp_path: Path, shm_dir: Path, refused: Refused
) -> None:
    model = byte_model(tmp_path, "target")
    weights = model / "model.safetensors"
    arguments = ["up", "--mode", "ar", "--target", str(model), "--set", f"run.shm_dir={shm_dir}"]
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 100)
    assert "model.safetensors: cut short" in refused(*arguments, status=1)
    weights.write_bytes(b"not weights at all")
    assert "model.safetensors: not a safetensors file" in refused(*arguments, status=1)
    weights.unlink()
    assert "model.safetensors" in refused(*arguments, status=1)


def test_up_refuses_a_length_the_model_does_not_have(
    model: Path, shm_dir: Path, refused: Refused
) -> None:
    place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
    assert "scheduler.max_model_len" in refused("up", *place, "--max-model-len", "9999", status=2)


def test_up_refuses_a_port_in_use(model: Path, shm_dir: Path, refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
        line = refused("up", *place, "--endpoint", endpoint, status=1)
    assert endpoint in line
    assert "in use" in line
    assert list_runs(shm_dir) == []


@pytest.mark.parametrize("more", [["--http"], []])
def test_up_refuses_a_gateway_port_in_use(
    more: list[str], model: Path, shm_dir: Path, refused: Refused
) -> None:
    """Also where only the port says that there is to be a gateway."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
        line = refused("up", *place, *more, "--port", port, status=1)
    assert line == (
        f"error: gateway.port: cannot listen on 127.0.0.1:{port}: Address already in use"
    )


def test_serve_is_up_with_a_gateway_and_down_ends_it(
    model: Path, tmp_path: Path, shm_dir: Path
) -> None:
    ready = tmp_path / "ready.json"
    place = ["--mode", "ar", "--set", f"run.shm_dir={shm_dir}", "--log-dir", str(tmp_path)]
    arguments = ["--port", "0", "--served-model-name", "mine", "--ready-file", str(ready)]
    process = subprocess.Popen(
        command("serve", str(model), *place, *arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(ready.exists, 120.0)
        url = json.loads(ready.read_text())["http"]
        assert [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]] == ["mine"]
        (found,) = list_pipelines(str(shm_dir))
        assert (found.pid, found.state, found.url) == (process.pid, "ready", url)
        done = ssd_pipe("down", found.name, "--shm-dir", str(shm_dir))
        assert (done.returncode, done.stdout) == (0, f"{found.name} stopped\n"), done.stderr
        assert list_runs(shm_dir) == []
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        assert "ssd-pipe down" in errors
        assert [line for line in errors.splitlines() if '"level": "error"' in line] == []
    finally:
        process.kill()
        process.wait()


def test_serve_refuses_what_up_refuses(model: Path, shm_dir: Path, refused: Refused) -> None:
    line = refused("serve", str(model), "--target", str(model), status=2)
    assert line == "error: --target: MODEL names the target already"
    # The built-in draft is another model's.
    line = refused("serve", str(model), "--set", f"run.shm_dir={shm_dir}", status=2)
    assert "draft.model: vocabulary of 49152 tokens, the target's has 259" in line
    assert "mode ar needs none" in line


def test_up_refuses_a_run_directory_in_use(model: Path, shm_dir: Path, refused: Refused) -> None:
    place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
    with RunDir.create(shm_dir, "taken"):
        line = refused("up", *place, "--run", "taken", status=1)
    assert "a run named 'taken' is already up" in line


def test_up_names_the_shared_memory_it_needs(
    tmp_path: Path, shm_dir: Path, refused: Refused
) -> None:
    """The hand-over of the rejection rule, for a vocabulary too large for any machine."""
    big = byte_model(tmp_path, "big")
    config = json.loads((big / "config.json").read_text())
    (big / "config.json").write_text(json.dumps(config | {"vocab_size": 2**34}))
    pair = ["--target", str(big), "--draft", str(big), "--set", f"run.shm_dir={shm_dir}"]
    line = refused("up", "--rule", "rejection", *pair, status=1)
    assert "not enough shared memory: 20971" in line  # 64 sequences * k 5 * 2**34 * 4 bytes
    assert "MiB needed" in line
    assert list_runs(shm_dir) == []


def test_a_target_without_a_tokenizer_starts_nothing(
    tmp_path: Path, shm_dir: Path, refused: Refused
) -> None:
    bare = byte_model(tmp_path, "bare")
    (bare / "tokenizer.json").unlink()
    line = refused(
        "up", "--mode", "ar", "--target", str(bare), "--set", f"run.shm_dir={shm_dir}", status=1
    )
    assert f"{bare}: no tokenizer" in line
    assert list_runs(shm_dir) == []


def test_a_process_that_is_no_part_of_the_run_is_refused(
    model: Path, shm_dir: Path, refused: Refused
) -> None:
    place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
    assert "'ar' has no draft" in refused("run", "draft", *place, status=2)
    assert "ranks 0..0, got 1" in refused("run", "target", "--rank", "1", *place, status=2)
    assert "proxy" in refused("run", "proxy", *place, status=2)


@pytest.mark.parametrize(
    ("arguments", "enabled"),
    [
        ([], False),
        (["--http"], True),
        (["--host", "localhost"], True),
        (["--api-key", "x"], True),
        (["--served-model-name", "x"], True),
        (["--port", "1", "--set", "gateway.enabled=false"], False),
        (["--set", "gateway.port=1"], False),
    ],
)
def test_flags_of_the_gateway_ask_for_one(arguments: list[str], enabled: bool) -> None:
    seen: list[ConfigSource] = []

    def take(source: ConfigSource) -> None:
        seen.append(source)

    app = typer.Typer()
    app.command()(config_options(take))
    app(arguments, standalone_mode=False)
    assert seen[0].load().gateway.enabled == enabled


def test_joining_a_run_with_another_configuration_is_refused(
    model: Path, shm_dir: Path, refused: Refused
) -> None:
    place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
    with RunDir.create(shm_dir, "mine") as run_dir:
        refused("run", "draft", *place, "--run", "mine", status=2)  # leaves its config there
        assert run_dir.config.exists()
        line = refused("run", "target", *place, "--run", "mine", "--k", "3", status=2)
    assert "mine" in line
    assert "another configuration" in line


def test_commands_without_a_pipeline_say_so(shm_dir: Path, refused: Refused) -> None:
    for arguments in (["status"], ["generate", "hello"], ["chat"], ["top", "--once"]):
        line = refused(*arguments, "--run", "no-such-run", status=1)
        assert "no-such-run" in line
        line = refused(*arguments, "--shm-dir", str(shm_dir), status=1)
        assert f"{shm_dir}/ssd-pipe-{os.getuid()}: no run" in line
        assert "--shm-dir" in line
    with RunDir.create(shm_dir, "one"), RunDir.create(shm_dir, "two"):
        line = refused("generate", "hello", "--shm-dir", str(shm_dir), status=1)
    assert "several runs, name one: one, two" in line
    assert "--run" in line
    assert "run=" not in line


def test_the_second_interrupt_leaves_an_answer_that_does_not_end() -> None:
    stream = Scripted(KeyboardInterrupt(), KeyboardInterrupt(), Chunk(id="r", finish_reason="x"))
    with pytest.raises(KeyboardInterrupt):
        show(cast(Stream, stream))
    assert stream.cancelled == 1


def test_an_error_gets_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Scripted(Chunk(id="r", text="half an"), PeerLost("gone"))
    with pytest.raises(PeerLost):
        show(cast(Stream, stream))
    assert capsys.readouterr().out == "half an\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "0"], "--max-tokens: must be at least 1"),
        (["--temperature", "-1"], "--temperature: must be between 0 and 100, got -1.0"),
        (["--top-p", "0"], "--top-p"),
        (["--stop", ""], "--stop"),
    ],
)
def test_a_wrong_sampling_option_is_named(
    arguments: list[str], words: str, refused: Refused
) -> None:
    assert words in refused("generate", "hello", *arguments, status=2)


def test_pull_of_nonsense_is_one_line(refused: Refused) -> None:
    assert "no such folder" in refused("pull", "nothing", status=1)


def test_the_program_itself_exits_with_the_status_and_one_line() -> None:
    done = ssd_pipe("up", "--k", "99")
    assert done.returncode == 2
    assert done.stderr == "error: speculation.k: must be 1..32, got 99\n"


def test_debug_shows_the_traceback() -> None:
    done = ssd_pipe("up", "--k", "99", SSD_DEBUG="1")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_help_lists_the_commands() -> None:
    done = ssd_pipe("--help")
    assert done.returncode == 0
    names = (
        "up",
        "serve",
        "run",
        "demo",
        "generate",
        "chat",
        "ps",
        "down",
        "status",
        "top",
        "trace",
    )
    for name in (*names, "pull", "doctor", "bench"):
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


def test_doctor_reports_as_json_and_as_a_table() -> None:
    done = ssd_pipe("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout, type=Report)
    assert report.machine["cores_here"] == len(os.sched_getaffinity(0))
    assert report.shared_memory["folder"] == "/dev/shm"
    assert report.shared_memory["needed_mib"] > 0
    missing = "missing" in report.models.values()
    assert bool(report.shared_memory["needed_assumes"]) == missing
    assert set(report.transports) == {"shm", "zmq", "rounds"}
    assert "devices" in report.device_transports
    assert "smollm2-draft-16m" in report.models
    table = io.StringIO()
    render(report, Console(file=table, width=200))
    for words in ("cores here", "smollm2-135m-instruct", report.machine["python"]):
        assert words in table.getvalue()


def test_without_a_gpu_doctor_needs_no_torch() -> None:
    script = (
        "import sys\n"
        "from ssd_pipe.cli.main import main\n"
        "try: main(['doctor'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    gpus = any(Path("/dev").glob("nvidia*"))
    assert done.stdout.splitlines()[-1] == str(gpus)


def test_doctor_names_the_setting_where_shared_memory_is_on_a_disk(
    disk_dir: Path, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'[run]\nshm_dir = "{disk_dir}"\n')
    report = msgspec.json.decode(ssd_pipe("doctor", "--json", "--config", str(config)).stdout)
    assert any(f"run.shm_dir: {disk_dir} is on" in line for line in report["missing"])
    plain = msgspec.json.decode(ssd_pipe("doctor", "--json").stdout)
    assert plain["shared_memory"]["file_system"] == "tmpfs"
    assert not any("run.shm_dir" in line for line in plain["missing"])


def test_the_version(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capfd.readouterr().out == f"ssd-pipe {__version__}\n"


def test_a_wrong_gateway_host_is_named(model: Path, shm_dir: Path, refused: Refused) -> None:
    place = ["--set", f"run.shm_dir={shm_dir}", "--mode", "ar", "--target", str(model)]
    for host in ("192.0.2.1", "no-such-host.invalid"):
        line = refused("up", *place, "--http", "--port", "0", "--host", host, status=1)
        assert line.startswith(f"error: gateway.host: cannot listen on {host}:0")


def test_an_address_for_every_network_is_told_as_one_that_clients_can_use() -> None:
    assert usable_endpoint("ipc:///x") == "ipc:///x"
    assert usable_endpoint("tcp://127.0.0.1:5") == "tcp://127.0.0.1:5"
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        host = usable_endpoint(f"tcp://0.0.0.0:{port}").removeprefix("tcp://").partition(":")[0]
        assert host != "0.0.0.0"
        socket.create_connection((host, port), 5).close()


def test_status_leaves_histograms_out(capfd: pytest.CaptureFixture[str]) -> None:
    counters = {"rounds": 3.0, "overhead_at_0": 1.0, "hits_at_10": 2.0}
    print_status(
        StatusReply(
            id="a",
            run="r",
            mode="ar",
            target="t",
            draft="",
            max_model_len=9,
            running=0,
            waiting=0,
            counters=counters,
        )
    )
    shown = capfd.readouterr().out
    assert "rounds 3" in shown
    assert "_at_" not in shown


@pytest.mark.parametrize(
    ("url", "environment", "key"),
    [
        ("http://127.0.0.1:8000/v1", {"SSD_API_KEY": "ours"}, "ours"),
        ("http://localhost:8000", {"SSD_API_KEY": "ours"}, "ours"),
        ("http://[::1]:8000", {"SSD_API_KEY": "ours", "OPENAI_API_KEY": "theirs"}, "theirs"),
        ("https://api.example.org/v1", {"SSD_API_KEY": "ours"}, ""),
        ("https://api.example.org/v1", {"SSD_API_KEY": "ours", "OPENAI_API_KEY": "x"}, "x"),
        ("http://127.0.0.1@example.org/", {"SSD_API_KEY": "ours"}, ""),
        ("http://[", {"SSD_API_KEY": "ours"}, ""),
    ],
)
def test_the_gateways_key_is_shown_to_this_machine_only(
    url: str, environment: dict[str, str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SSD_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert key_for(url) == key
