"""What is said where the native CPU kernels cannot be built."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path

import pytest

from ssd_pipe import LLM
from ssd_pipe.client import Client
from ssd_pipe.config_load import load
from ssd_pipe.doctor import examine
from ssd_pipe.relay import Relay
from ssd_pipe.slow_kernels import NOTE
from ssd_pipe.supervisor import Supervisor
from tests.pipelines import byte_model, command


def test_the_supervisor_says_once_why_plain_torch_computes(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    model = str(byte_model(tmp_path, "target"))
    settings = {
        "target.model": model,
        "draft.model": model,
        "target.threads": 1,
        "draft.threads": 1,
        "run.shm_dir": str(shm_dir),
        "run.log_dir": str(tmp_path / "logs"),
    }
    reason = "native kernels: CXX='/no/such/compiler' was not found"
    shown = io.StringIO()
    sink = Relay("warning", shown)
    with (
        Supervisor(load(None, settings), sink) as supervisor,
        Client(supervisor.endpoint) as client,
    ):
        notes = {p.name: p.notes for p in client.status().processes}
        logs = supervisor.log_dir
    assert notes["target-0"][NOTE] == notes["draft"][NOTE] == reason
    assert NOTE not in notes["frontend"]
    lines = [line for line in map(json.loads, shown.getvalue().splitlines()) if reason in str(line)]
    assert [(line["level"], line["proc"]) for line in lines] == [("warning", "supervisor")]
    assert set(lines[0]["processes"].split(", ")) == {"target-0", "draft"}
    for name in ("supervisor", "target-0", "draft"):
        assert reason in (logs / f"{name}.jsonl").read_text()


def test_a_script_is_warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    model = str(byte_model(tmp_path, "target"))
    settings = {"run.log_dir": str(tmp_path), "target.threads": 1}
    with (
        pytest.warns(RuntimeWarning, match=r"CXX='/no/such/compiler' was not found \(target-0\)"),
        LLM(model, mode="ar", settings=settings),
    ):
        pass


def test_a_process_alone_says_it_on_its_terminal(tmp_path: Path, shm_dir: Path) -> None:
    model = str(byte_model(tmp_path, "target"))
    place = ["--mode", "ar", "--target", model, "--set", f"run.shm_dir={shm_dir}"]
    place += ["--set", "target.threads=1", "--log-dir", str(tmp_path)]
    environment = os.environ | {"CXX": "/no/such/compiler"}
    started = [
        subprocess.Popen(
            command("run", role, *place), stderr=subprocess.PIPE, text=True, env=environment
        )
        for role in ("scheduler", "frontend", "target")
    ]
    try:
        errors = started[-1].stderr
        assert errors is not None
        said = next(line for line in errors if NOTE in line)
        assert "CXX='/no/such/compiler' was not found" in said
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.communicate()


@pytest.mark.parametrize("trouble", ["no compiler", "a compiler that fails", "no folder"])
def test_doctor_knows(trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reasons = {
        "no compiler": "CXX='/no/such/compiler' was not found",
        "a compiler that fails": "broken failed: exit status 3",
        "no folder": "Not a directory",
    }
    if trouble == "no compiler":
        monkeypatch.setenv("CXX", "/no/such/compiler")
    elif trouble == "a compiler that fails":
        broken = tmp_path / "broken"
        broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1 && exit 0\nexit 3\n')
        broken.chmod(0o755)
        monkeypatch.setenv("CXX", str(broken))
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    [told] = [line for line in examine(load(None, {})).missing if "CPU kernels" in line]
    assert reasons[trouble] in told
    assert not (tmp_path / "ssd-pipe").exists()


def test_doctor_misses_nothing_where_the_kernels_can_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not [line for line in examine(load(None, {})).missing if "CPU kernels" in line]
    assert not (tmp_path / "ssd-pipe").exists()
