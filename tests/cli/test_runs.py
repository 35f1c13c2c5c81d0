"""``ssd-pipe ps`` and ``ssd-pipe down`` with pipelines of every kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from ipc.rundir import OWNED, RunDir, list_runs
from ssd_pipe.client import Client
from ssd_pipe.config_load import load
from ssd_pipe.errors import ResourceError
from ssd_pipe.run_control import announce, stop_requested
from ssd_pipe.runs import await_end, begin_stop, choose_runs, end_runs, list_pipelines
from ssd_pipe.supervisor import GroupState, Supervisor
from tests.cli.conftest import Running
from tests.frontend_peer import Echo, pipeline
from tests.pipelines import byte_model, command
from tests.test_supervisor import Lines
from tests.waiting import wait_for

TIMEOUT = 60
START = 120.0
ROLES = ("scheduler", "target", "frontend")


def ssd_pipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


@pytest.fixture
def settings(tmp_path: Path, shm_dir: Path) -> dict[str, Any]:
    return {
        "mode": "ar",
        "target.model": str(byte_model(tmp_path, "target")),
        "target.threads": 1,
        "run.shm_dir": str(shm_dir),
        "run.log_dir": str(tmp_path / "logs"),
    }


def as_options(settings: dict[str, Any]) -> list[str]:
    return [part for n, v in settings.items() for part in ("--set", f"{n}={json.dumps(v)}")]


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_ps_tells_all_of_a_pipeline(running: Running) -> None:
    place = ["--shm-dir", running.shm_dir]
    (told,) = json.loads(ssd_pipe("ps", "--json", *place).stdout)
    config = running.supervisor.config
    processes = {p.name: p.pid for p in running.client.status().processes}
    assert (told["name"], told["state"], told["mode"]) == (config.run.name, "ready", "ssd")
    assert (told["target"], told["draft"]) == (config.target.model, config.draft.model)
    assert (told["pid"], told["pids"]) == (os.getpid(), processes)
    assert (told["url"], told["endpoint"]) == (running.url, running.supervisor.endpoint)
    assert 0 < time.time() - told["since"] < 3600
    table = ssd_pipe("ps", *place)
    assert (table.returncode, table.stderr) == (0, "")
    heading, row = table.stdout.splitlines()
    places = [heading.index(name) for name in ("TARGET", "REQUESTS", "URL", "ENDPOINT")]
    cells = [row[at:].split()[0] for at in places]
    assert cells == ["target", "0+0", running.url, running.supervisor.endpoint]


def test_ps_counts_the_requests(tmp_path: Path, held: ExitStack) -> None:
    run = held.enter_context(pipeline(tmp_path))
    held.callback(Echo(run.peer).close)
    wait_for(lambda: list_pipelines(run.shm_dir)[0].running == 1)  # as Echo says
    (found,) = list_pipelines(run.shm_dir)
    assert (found.name, found.state, found.pid, found.waiting) == ("t", "ready", 0, 0)
    with Client(found.endpoint) as client:
        assert client.status().run == "t"


def test_a_run_that_does_not_answer_is_listed(shm_dir: Path, held: ExitStack) -> None:
    run = held.enter_context(RunDir.create(shm_dir, "r"))
    (found,) = list_pipelines(str(shm_dir))
    assert (found.name, found.state, found.mode, found.url) == ("r", "starting", "", "")
    run.config.write_text("of another version")
    run.socket("public").touch()
    (found,) = list_pipelines(str(shm_dir))
    assert (found.state, found.mode) == ("no answer", "")
    done = ssd_pipe("down", "--shm-dir", str(shm_dir))
    assert (done.returncode, done.stdout) == (1, "")
    assert "run 'r' has no supervisor and does not say what runs in it" in done.stderr


def test_status_of_a_pipeline_as_json(running: Running) -> None:
    told = json.loads(ssd_pipe("status", "--json", *running.place).stdout)
    assert (told["run"], told["state"]) == (running.supervisor.config.run.name, "ready")
    names = {process["name"] for process in told["processes"]}
    assert names == {process.name for process in running.client.status().processes}
    assert told["counters"]["rounds"] >= 0
    done = ssd_pipe("status", *running.place)
    assert done.stdout.startswith(f"run {told['run']}: ready, mode ssd")


def test_status_of_a_pipeline_that_starts(tmp_path: Path, shm_dir: Path, held: ExitStack) -> None:
    run = held.enter_context(pipeline(tmp_path))  # whose scheduler tells nothing yet
    done = ssd_pipe("status", "--shm-dir", str(run.shm_dir))
    assert done.stdout.startswith("run t: starting, mode ")
    held.enter_context(RunDir.create(shm_dir, "r"))
    done = ssd_pipe("status", "--shm-dir", str(shm_dir))
    assert (done.returncode, done.stdout) == (0, "run r: starting\n")
    done = ssd_pipe("status", "--json", "--run", "r", "--shm-dir", str(shm_dir))
    assert json.loads(done.stdout) == {"run": "r", "state": "starting"}


def test_none_is_a_table_without_rows(shm_dir: Path) -> None:
    place = ["--shm-dir", str(shm_dir)]
    assert len(ssd_pipe("ps", *place).stdout.splitlines()) == 1
    assert json.loads(ssd_pipe("ps", "--json", *place).stdout) == []
    done = ssd_pipe("down", "--all", *place)
    assert (done.returncode, done.stdout) == (0, "no pipeline is running\n")
    done = ssd_pipe("down", *place)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "no run" in done.stderr


def test_which_runs_are_meant(shm_dir: Path, held: ExitStack) -> None:
    place = str(shm_dir)
    owned = f"{OWNED}7-01234567"
    held.enter_context(RunDir.create(shm_dir, owned))
    assert choose_runs(place, [], every=True) == []
    with pytest.raises(ResourceError, match=f"no run but those that programs .*: {owned}"):
        choose_runs(place, [], every=False)
    held.enter_context(RunDir.create(shm_dir, "a"))
    assert choose_runs(place, [], every=False) == ["a"]
    held.enter_context(RunDir.create(shm_dir, "b"))
    assert choose_runs(place, [], every=True) == ["a", "b"]
    assert choose_runs(place, [owned, "b", owned], every=False) == [owned, "b"]
    with pytest.raises(ResourceError, match="several runs, name one: a, b"):
        choose_runs(place, [], every=False)
    with pytest.raises(ResourceError, match=r"no run 'c' in .*; there are: a, b"):
        choose_runs(place, ["a", "c"], every=False)
    done = ssd_pipe("down", "a", "--all", "--shm-dir", place)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --all: ")


def test_down_ends_a_pipeline_and_not_the_program_that_has_it(
    settings: dict[str, Any], shm_dir: Path
) -> None:
    with Supervisor(load(None, settings), sink=Lines()) as supervisor:
        name = supervisor.config.run.name
        done = ssd_pipe("down", "--all", "--shm-dir", str(shm_dir))
        assert (done.returncode, done.stdout) == (0, f"{name} stopped\n")
        assert supervisor.wait(TIMEOUT)
        assert (supervisor.state, supervisor.failure) == (GroupState.STOPPED, "")


def test_a_run_that_cannot_be_ended_keeps_no_other(
    settings: dict[str, Any], shm_dir: Path, held: ExitStack
) -> None:
    for name in ("aa", "zz"):  # without a supervisor, before and after the one that has one
        held.enter_context(RunDir.create(shm_dir, name))
    supervisor = held.enter_context(
        Supervisor(load(None, settings | {"run.name": "rb"}), sink=Lines())
    )
    done = ssd_pipe("down", "--all", "--shm-dir", str(shm_dir))
    assert (done.returncode, done.stdout) == (1, "rb stopped\n")
    for name in ("aa", "zz"):
        assert f"run '{name}' has no supervisor" in done.stderr
    assert done.stderr.count("\n") == 1
    assert supervisor.wait(TIMEOUT)
    assert (supervisor.state, list_runs(shm_dir)) == (GroupState.STOPPED, ["aa", "zz"])


def test_a_run_that_has_ended_meanwhile_is_no_error(shm_dir: Path) -> None:
    names = ["gone", "left"]
    with ExitStack() as runs:
        for name in names:
            runs.enter_context(RunDir.create(shm_dir, name))
        chosen = choose_runs(str(shm_dir), names, every=False)
    (shm_dir / f"ssd-pipe-{os.getuid()}" / "left").mkdir()  # as after a crash of all of it
    assert list(end_runs(str(shm_dir), chosen)) == names


def test_a_pipeline_can_be_ended_from_its_first_moment(
    settings: dict[str, Any], shm_dir: Path
) -> None:
    class Ending(Lines):
        """Asks for the end before the configuration is written."""

        def open_file(self, path: Path, limit: int = 0) -> None:
            (name,) = list_runs(shm_dir)
            begin_stop(str(shm_dir), name)

    supervisor = Supervisor(load(None, settings), sink=Ending())
    supervisor.start()
    assert not supervisor.wait_ready()
    assert supervisor.wait(TIMEOUT)
    assert (supervisor.state, supervisor.failure) == (GroupState.STOPPED, "")


def test_a_run_that_stays_is_told_of(shm_dir: Path, held: ExitStack) -> None:
    run = held.enter_context(RunDir.create(shm_dir, "r"))
    announce(run)
    with pytest.raises(
        ResourceError, match=f"after 0.1 s; its supervisor is process {os.getpid()}"
    ):
        await_end(str(shm_dir), "r", 0.1)
    run.stop_request.touch()
    run.bell("x").touch()
    run.wipe()
    assert stop_requested(run)  # a request outlives a restart
    assert not run.bell("x").exists()


def test_down_ends_processes_that_were_started_one_by_one(
    settings: dict[str, Any], shm_dir: Path, held: ExitStack
) -> None:
    options = ["--run", "single", *as_options(settings)]
    processes = [
        subprocess.Popen(
            command("run", role, *options), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for role in ROLES
    ]
    for process in processes:
        held.callback(process.wait)
        held.callback(process.kill)

    def ready() -> bool:
        assert all(process.poll() is None for process in processes)
        return [run.state for run in list_pipelines(str(shm_dir))] == ["ready"]

    wait_for(ready, START)
    (found,) = list_pipelines(str(shm_dir))
    assert found.pid == 0
    assert sorted(found.pids.values()) == sorted(process.pid for process in processes)
    done = ssd_pipe("down", "--shm-dir", str(shm_dir))
    assert (done.returncode, done.stdout, done.stderr) == (0, "single stopped\n", "")
    for process in processes:
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, errors
    assert list_runs(shm_dir) == []


def test_a_process_that_ignores_its_end_is_named(tmp_path: Path, held: ExitStack) -> None:
    """The processes are those that a pipeline tells of: here one that looks like its scheduler."""
    script = (
        "import signal, sys\n"
        "from ssd_pipe.prctl import set_title\n"
        "set_title('ssd-scheduler')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    held.callback(process.wait)
    held.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    run = held.enter_context(pipeline(tmp_path, grace=0.2))
    held.callback(Echo(run.peer, pid=process.pid).close)
    wait_for(lambda: list_pipelines(run.shm_dir)[0].pids == {"scheduler": process.pid})
    done = ssd_pipe("down", "t", "--shm-dir", run.shm_dir)
    assert done.returncode == 1
    assert f"process {process.pid} has not ended within 0.2 s" in done.stderr
    other = psutil.Process(process.pid)
    assert other.is_running()
    other.send_signal(signal.SIGKILL)


def test_a_number_that_means_another_process_here_is_left_alone(
    tmp_path: Path, held: ExitStack
) -> None:
    process = subprocess.Popen(["sleep", "600"])
    held.callback(process.wait)
    held.callback(process.kill)
    run = held.enter_context(pipeline(tmp_path))
    held.callback(Echo(run.peer, pid=process.pid).close)
    wait_for(lambda: list_pipelines(run.shm_dir)[0].pids == {"scheduler": process.pid})
    with pytest.raises(ResourceError, match="run 't': none of its processes is found here"):
        begin_stop(run.shm_dir, "t")
    assert process.poll() is None
