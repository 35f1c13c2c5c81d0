"""Whole pipelines of a tiny model pair: started, used, ended, and broken in every way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ipc.messages.client import StatusReply
from ipc.rundir import list_runs
from ssd_pipe.client import Client
from ssd_pipe.config_load import load
from ssd_pipe.errors import ConfigError, PeerLost, RequestError
from ssd_pipe.supervisor import GroupState, Supervisor
from tests.pipelines import byte_model, command
from tests.test_supervisor import Lines
from tests.waiting import wait_for

START_TIMEOUT = 120.0  # seconds; several test runs may share two cores
PROCESSES = ("scheduler", "target-0", "draft", "frontend")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return byte_model(folder, "target", seed=1), byte_model(folder, "draft", seed=1)


@pytest.fixture
def settings(pair: tuple[Path, Path], shm_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "mode": "ssd",
        "target.model": str(pair[0]),
        "draft.model": str(pair[1]),
        "target.threads": 1,
        "speculation.adaptive": False,  # on a busy machine it may not speculate at all
        "run.shm_dir": str(shm_dir),
        "run.log_dir": str(tmp_path / "logs"),
        "run.on_draft_failure": "fail",
    }


class Up:
    """``ssd-pipe up`` as a process of its own."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self.ready_file = folder / "ready.json"
        self.output = folder / "up.out"
        arguments = ["up", "--no-pull", "--ready-file", str(self.ready_file)]
        for name, value in settings.items():
            arguments += ["--set", f"{name}={json.dumps(value)}"]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command(*arguments), stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def ready(self) -> dict[str, Any]:
        """Wait for the ready file; returns its content."""

        def there() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return self.ready_file.exists()

        wait_for(there, START_TIMEOUT)
        content: dict[str, Any] = json.loads(self.ready_file.read_text())
        return content

    def wait(self, timeout: float) -> tuple[int, str]:
        """Exit status and everything printed."""
        return self.process.wait(timeout), self.output.read_text()


@pytest.fixture
def up(settings: dict[str, Any], tmp_path: Path) -> Iterator[Up]:
    started = Up(settings, tmp_path)
    yield started
    if started.process.poll() is None:
        started.process.send_signal(signal.SIGCONT)
        started.process.kill()
        started.process.wait()


def all_gone(pids: list[int]) -> bool:
    return all(_is_gone(pid) for pid in pids)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def left_behind(shm_dir: Path) -> list[str]:
    return [path.name for path in shm_dir.glob("ssd-pipe-*/*")]


def test_up_answers_requests_and_ctrl_c_ends_it_with_nothing_left(up: Up, shm_dir: Path) -> None:
    ready = up.ready()
    assert set(ready) == {"run", "endpoint", "pids", "log_dir"}
    assert set(ready["pids"]) == set(PROCESSES)
    with Client(ready["endpoint"]) as client:
        status: StatusReply = client.status()
        assert {p.name: p.pid for p in status.processes} == ready["pids"]
        result = client.generate("hello", max_tokens=24, ignore_eos=True)
        assert len(result.token_ids) == 24
        assert result.metrics is not None
        assert result.metrics.rounds > 0
    asked = command("generate", "hello", "--raw", "--endpoint", ready["endpoint"])
    options = ["--max-tokens", "24", "--ignore-eos", "--metrics"]
    done = subprocess.run([*asked, *options], capture_output=True, timeout=60, check=True)
    assert done.stdout.decode(errors="replace") == result.text + "\n"
    assert b"24 output tokens" in done.stderr
    assert b"cache hit rate" in done.stderr
    logs = {path.name for path in Path(ready["log_dir"]).iterdir()}
    assert logs == {f"{name}.jsonl" for name in (*PROCESSES, "supervisor")}
    up.process.send_signal(signal.SIGINT)
    status_code, output = up.wait(20)
    assert status_code == 0, output
    assert all_gone(list(ready["pids"].values()))
    assert left_behind(shm_dir) == []
    assert not up.ready_file.exists()


def test_ctrl_c_with_requests_running_is_no_error(up: Up) -> None:
    ready = up.ready()
    with Client(ready["endpoint"]) as client:
        stream = client.stream("hello", max_tokens=500, ignore_eos=True, n=16)
        next(stream)
        up.process.send_signal(signal.SIGINT)
        with pytest.raises(RequestError, match="the pipeline is stopping"):
            stream.result()
        status, output = up.wait(20)
    assert status == 0, output
    assert "error" not in output
    log = (Path(ready["log_dir"]) / "scheduler.jsonl").read_text()
    last = json.loads(log.splitlines()[-1])
    assert (last["event"], last["status"], last["reason"]) == ("exit", 0, "SIGTERM")


@pytest.mark.parametrize(
    "victim",
    [
        "target-0",
        pytest.param("scheduler", marks=pytest.mark.slow),
        pytest.param("draft", marks=pytest.mark.slow),
        pytest.param("frontend", marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_is_named_and_takes_the_group_down(
    up: Up, shm_dir: Path, victim: str
) -> None:
    ready = up.ready()
    pids = ready["pids"]
    with Client(ready["endpoint"]) as client:
        stream = client.stream("hello", max_tokens=480, ignore_eos=True)
        next(stream)
        os.kill(pids[victim], signal.SIGKILL)
        heard = "has gone" if victim == "frontend" else f"^pipeline stopped: {victim}: "
        with pytest.raises((PeerLost, RequestError), match=heard):
            stream.result()
        status, output = up.wait(10)
    assert status == 1
    assert f"error: {victim}: was killed by SIGKILL" in output.splitlines()[-1]
    assert all_gone(list(pids.values()))
    assert left_behind(shm_dir) == []


def test_nothing_outlives_a_supervisor_that_is_killed(up: Up, shm_dir: Path) -> None:
    pids = list(up.ready()["pids"].values())
    up.process.kill()
    up.process.wait()
    wait_for(lambda: all_gone(pids), 10)
    wait_for(lambda: left_behind(shm_dir) == [], 10)


def test_a_stop_during_start_up_is_orderly(up: Up, shm_dir: Path) -> None:
    wait_for(lambda: list_runs(shm_dir) != [], START_TIMEOUT)
    up.process.send_signal(signal.SIGTERM)
    status, output = up.wait(20)
    assert status == 0, output
    assert left_behind(shm_dir) == []


def test_supervisor_as_a_context_manager(settings: dict[str, Any], shm_dir: Path) -> None:
    supervisor = Supervisor(load(None, settings | {"mode": "ar", "run.log_level": "error"}))
    with supervisor:
        assert supervisor.state is GroupState.READY
        assert set(supervisor.pids) == {"scheduler", "target-0", "frontend"}
        assert list_runs(shm_dir) == [supervisor.config.run.name]
        pids = list(supervisor.pids.values())
        with Client(supervisor.endpoint) as client:
            assert client.generate("x", max_tokens=3, ignore_eos=True).metrics is not None
    assert supervisor.state is GroupState.STOPPED
    assert supervisor.exit_status == 0
    assert all_gone(pids)


@pytest.mark.parametrize("place", ["none/ready.json", "file/ready.json", "folder"])
def test_a_ready_file_that_cannot_be_is_refused_before_anything_starts(
    settings: dict[str, Any], shm_dir: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    supervisor = Supervisor(load(None, settings), ready_file=tmp_path / place)
    with pytest.raises(ConfigError, match=r"^--ready-file: "):
        supervisor.start()
    assert supervisor.pids == {}
    assert left_behind(shm_dir) == []


def test_shared_memory_on_a_disk_is_warned_of_once(
    settings: dict[str, Any], disk_dir: Path
) -> None:
    lines = Lines()
    supervisor = Supervisor(load(None, settings | {"run.shm_dir": str(disk_dir)}), lines)
    supervisor.start()
    supervisor.stop()
    warnings = [event for event, _ in lines.events if event.startswith("run.shm_dir: ")]
    assert len(warnings) == 1
    assert f"{disk_dir} is on " in warnings[0]


@pytest.mark.slow
def test_a_restart_goes_without_a_ready_file_that_cannot_be_written(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    folder, lines = tmp_path / "gone", Lines()
    folder.mkdir()
    config = load(None, settings | {"mode": "ar", "run.on_failure": "restart"})
    with Supervisor(config, lines, folder / "ready.json") as supervisor:
        shutil.rmtree(folder)
        os.kill(supervisor.pids["target-0"], signal.SIGKILL)
        wait_for(lambda: supervisor.restarts == 1, 20)
        wait_for(lambda: supervisor.state is GroupState.READY, START_TIMEOUT)
        warning = "the ready file cannot be written"
        wait_for(lambda: warning in [event for event, _ in lines.events], 10)
        with Client(supervisor.endpoint) as client:
            assert len(client.generate("x", max_tokens=3, ignore_eos=True).token_ids) == 3
    assert supervisor.exit_status == 0


@pytest.mark.slow
def test_a_process_that_hangs_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    up = Up(settings | {"run.beat_timeout": 2.0}, tmp_path)
    ready = up.ready()
    pids, log_dir = ready["pids"], ready["log_dir"]
    os.kill(pids["target-0"], signal.SIGSTOP)
    status, output = up.wait(20)
    assert status == 1
    assert "target-0" in output.splitlines()[-1]
    lines = Path(log_dir, "supervisor.jsonl").read_text().splitlines()
    times = {record["event"]: record["t"] for record in map(json.loads, lines)}
    assert (times["stopped"] - times["failed"]) * 1e-9 < 2.5  # nobody waits for it to end
    assert all_gone(list(pids.values()))


def test_a_machine_that_stands_still_ends_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    up = Up(settings | {"run.beat_timeout": 1.0}, tmp_path)
    ready = up.ready()
    with Client(ready["endpoint"]) as client:
        before = client.generate("x", max_tokens=4, ignore_eos=True)
        everyone = [up.process.pid, *ready["pids"].values()]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in everyone:
                os.kill(pid, number)
            time.sleep(2.5)  # the pause, and time in which a loss would be noticed
        assert client.generate("x", max_tokens=4, ignore_eos=True).token_ids == before.token_ids
    assert up.process.poll() is None
    up.process.send_signal(signal.SIGTERM)
    assert up.wait(20)[0] == 0


def test_the_procfile_starts_the_same_pipeline(
    settings: dict[str, Any], shm_dir: Path, tmp_path: Path
) -> None:
    config = tmp_path / "pipe.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    config.write_text("\n".join(lines))
    environment = os.environ | {"SSD_RUN": "procfile-test", "SSD_CONFIG": str(config)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    runner = subprocess.Popen(
        [sys.executable, "-m", "honcho", "start"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(lambda: "procfile-test" in list_runs(shm_dir), START_TIMEOUT)
        wait_for(lambda: _ready(shm_dir, "procfile-test"), START_TIMEOUT)
        with Client(run="procfile-test", shm_dir=str(shm_dir)) as client:
            result = client.generate("hello", max_tokens=8, ignore_eos=True)
        assert len(result.token_ids) == 8
    finally:
        runner.send_signal(signal.SIGINT)
        output, _ = runner.communicate(timeout=30)
    wait_for(lambda: left_behind(shm_dir) == [], 10)
    assert "error" not in output


def _ready(shm_dir: Path, run: str) -> bool:
    try:
        with Client(run=run, shm_dir=str(shm_dir), timeout=2.0) as client:
            states = {p.name: p.state for p in client.status().processes}
    except Exception:
        return False  # not listening yet
    return set(states) == set(PROCESSES) and set(states.values()) == {"ready"}
