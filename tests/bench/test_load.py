"""Load: arrivals and figures by themselves, then real pipelines, over ZeroMQ and over HTTP."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.load.clients import Sample
from bench.load.summary import summarise, text
from bench.load.traffic import Traffic
from ipc.rundir import list_runs
from ssd_pipe.config_load import load
from ssd_pipe.supervisor import Supervisor
from tests.frontend_peer import TEMPLATE
from tests.pipelines import byte_model

TIMEOUT = 120


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {"target": byte_model(folder, "target"), "draft": byte_model(folder, "draft", seed=1)}
    for model in made.values():  # the prompts have a token a byte
        config = model / "config.json"
        settings = {**json.loads(config.read_text()), "max_position_embeddings": 1024}
        config.write_text(json.dumps(settings))
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return made


def settings_of(models: dict[str, Path], shm_dir: Path, folder: Path) -> dict[str, Any]:
    return {
        "target.model": str(models["target"]),
        "draft.model": str(models["draft"]),
        "run.shm_dir": str(shm_dir),
        "run.log_dir": str(folder / "logs"),
        "scheduler.max_num_seqs": 2,
        "target.threads": 1,
        "draft.threads": 1,
    }


def bench_load(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    output = folder / "results.json"
    done = subprocess.run(
        [*[sys.executable, "-m", "bench", "--load", "--output", str(output)], *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    return done, json.loads(output.read_text()) if output.exists() else None


def test_modes_side_by_side(models: dict[str, Path], shm_dir: Path, tmp_path: Path) -> None:
    settings = settings_of(models, shm_dir, tmp_path)
    given = [f"--set={name}={value}" for name, value in settings.items()]
    sizes = ["--concurrency", "1,3", "--num-prompts", "4", "--tokens", "6", "--repeats", "2"]
    done, found = bench_load(
        tmp_path, "--modes", "ar,ssd", *given, *sizes, "--save-samples", "--api-key=hidden"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Output token throughput (tok/s):") == 8
    assert "x AR" in done.stdout
    loads = found["loads"]
    order = [(x["repeat"], x["traffic"]["concurrency"], x["server"]) for x in loads]
    assert order[:4] == [(0, 1, "ar"), (0, 1, "ssd"), (0, 3, "ar"), (0, 3, "ssd")]
    assert order[4:6] == [(1, 1, "ssd"), (1, 1, "ar")]
    for part in loads:
        summary = part["summary"]
        assert summary["completed"] == 4
        assert summary["failed"] == 0
        assert summary["total_output"] == 24
        assert summary["peak_concurrent"] == part["traffic"]["concurrency"]
        assert summary["ttft"]["median"] <= summary["e2el"]["median"]
        assert all(sample["output_tokens"] == 6 for sample in part["samples"])
        assert part["counters"]["output_tokens"] == 24
    assert found["servers"]["ssd"]["settings"]["config"]["mode"] == "ssd"
    assert found["command"][:3] == ["ssd-pipe", "bench", "--load"]
    assert "hidden" not in json.dumps(found)
    assert not list_runs(str(shm_dir))


def test_a_running_server_over_http_and_zeromq(
    models: dict[str, Path], shm_dir: Path, tmp_path: Path
) -> None:
    config = load(
        None,
        settings_of(models, shm_dir, tmp_path)
        | {"mode": "ar", "gateway.enabled": True, "gateway.port": 0},
    )
    sizes = ["--num-prompts", "3", "--tokens", "5"]
    with Supervisor(config, ready_file=tmp_path / "ready.json") as supervisor:
        url = json.loads((tmp_path / "ready.json").read_text())["http"]
        done, found = bench_load(tmp_path, "--url", url, "--request-rate", "50", *sizes)
        assert done.returncode == 0, done.stderr
        [over_http] = found["loads"]
        assert over_http["traffic"]["rate"] == 50
        assert over_http["summary"]["total_output"] == 15
        (tmp_path / "results.json").unlink()
        done, found = bench_load(
            tmp_path, "--endpoint", supervisor.endpoint, "--concurrency", "2", *sizes
        )
        assert done.returncode == 0, done.stderr
        [over_zmq] = found["loads"]
    for name in ("total_input", "total_output", "completed"):
        assert over_http["summary"][name] == over_zmq["summary"][name]
    assert "Median TPOT (ms):" in done.stdout


def test_a_request_that_is_refused_is_counted_and_fails_the_run(
    models: dict[str, Path], shm_dir: Path, tmp_path: Path
) -> None:
    settings = settings_of(models, shm_dir, tmp_path) | {"mode": "ar"}
    with Supervisor(load(None, settings | {"scheduler.max_model_len": 32})) as supervisor:
        reach = ["--endpoint", supervisor.endpoint, "--concurrency", "1", "--num-prompts", "2"]
        done, found = bench_load(tmp_path, *reach)
    assert done.returncode == 1
    assert found["loads"][0]["summary"]["failed"] == 2
    assert "exceed max_model_len = 32" in done.stdout


def test_a_server_that_is_not_there_leaves_no_results(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    done, found = bench_load(tmp_path, "--url", f"http://127.0.0.1:{port}", "--num-prompts", "1")
    assert done.returncode == 1
    assert f"http://127.0.0.1:{port}/v1: " in done.stderr
    assert found is None
    assert "results:" not in done.stdout
    assert not list(tmp_path.glob(".results*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modes", "warp"], "--modes: 'warp' is none of: ar, sd, ssd"),
        (["--modes", "ar", "--url", "http://x"], "--modes: starts pipelines"),
        (["--concurrency", "0"], "--concurrency: must be at least 1"),
        (["--request-rate", "0"], "--request-rate: must be above 0"),
        (["--request-rate", "1", "--concurrency", "1,2"], "--concurrency: one limit"),
        (["--prompt-set", "none"], "--prompt-set: 'none' is none of"),
        (["--tokens", "0"], "max_tokens: must be at least 1"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1: "),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--load", "--output", str(tmp_path / "results.json"), *arguments]) in (1, 2)
    [line] = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_poisson_arrivals_have_the_rate_and_repeat_with_the_seed() -> None:
    traffic = Traffic(rate=20, requests=4000)
    due = traffic.due(3)
    assert due == traffic.due(3) != traffic.due(4)
    assert due == sorted(due)
    assert due[0] == 0
    assert due[-1] == pytest.approx(200, rel=0.1)
    gaps = sorted(b - a for a, b in itertools.pairwise(due))
    assert gaps[len(gaps) // 2] == pytest.approx(0.693 / 20, rel=0.1)  # exponential, not even
    assert Traffic(concurrency=3, requests=2).due(1) == [0, 0]


def test_figures_are_vllms() -> None:
    good = Sample(
        prompt="a",
        due=10.0,
        sent=10.5,
        arrivals=[11.0, 11.2, 11.6],
        ended=11.6,
        prompt_tokens=7,
        output_tokens=5,
    )
    late = Sample(prompt="b", due=10.0, sent=11.0, ended=12.0, error="no room")
    summary = summarise([good, late])
    assert (summary.completed, summary.failed, summary.peak_concurrent) == (1, 1, 2)
    assert summary.duration == pytest.approx(2.0)
    assert summary.output_throughput == pytest.approx(2.5)
    assert summary.total_token_throughput == pytest.approx(6.0)
    assert summary.ttft.median == pytest.approx(500)
    assert summary.tpot.mean == pytest.approx(150)
    assert summary.itl.mean == pytest.approx(300)
    assert summary.itl.p99 == pytest.approx(398)
    assert summary.e2el.p99 == pytest.approx(1100)
    assert summary.errors == ["no room"]
    shown = text("load", summary)
    assert "Output token throughput (tok/s):         2.50" in shown
    assert all(len(line) <= 52 for line in shown.splitlines())
