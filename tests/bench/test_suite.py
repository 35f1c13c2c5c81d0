"""Data sets, sweeps, batches, trajectories, comparison and pictures, end to end, in processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from ipc.rundir import list_runs
from tests.pipelines import byte_model

TIMEOUT = 170


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("models"), "target")


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """A folder with small data sets."""
    folder = tmp_path / "sets"
    for name in ("gsm8k", "mt-bench", "mbpp", "truthfulqa"):
        (folder / name).mkdir(parents=True)
        records = [json.dumps({"text": f"{name} {i}?"}) for i in range(3)]
        (folder / name / "data.jsonl").write_text("\n".join(records))
    return folder


def bench(
    model: Path, shm_dir: Path, sets: Path, output: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    # The model drafts for itself: every chain is accepted.
    command = [sys.executable, "-m", "bench", "--target", str(model), "--draft", str(model)]
    command += ["--k", "2", "--backup", "jit", "--output", str(output)]
    command += ["--set", f"run.shm_dir={shm_dir}", "--log-dir", str(output.parent / "logs")]
    environment = {**os.environ, "SSD_DATASET_DIR": str(sets), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env=environment,
    )


def test_every_data_set_has_its_rows_and_all_have_one(
    model: Path, shm_dir: Path, sets: Path, tmp_path: Path
) -> None:
    output = tmp_path / "all.json"
    rounds, trace = tmp_path / "rounds.jsonl", tmp_path / "trace.json"
    saved = ["--save-trajectories", str(rounds), "--save-trace", str(trace)]
    sizes = ["--all", "--prompts", "2", "--tokens", "12", "--repeats", "1", "--frames", "own"]
    done = bench(model, shm_dir, sets, output, *sizes, *saved, "--engines", "ar,ssd")
    assert done.returncode == 0, done.stderr
    assert "by set" in done.stdout
    assert "alpaca: not on this machine" in done.stdout
    [frame] = json.loads(output.read_text())["frames"]
    names = {"gsm8k", "mt-bench", "mbpp", "truthfulqa"}
    assert names <= set(frame["set_rows"])
    for name, rows in frame["set_rows"].items():
        assert [(row["engine"], row["set"], row["requests"]) for row in rows] == [
            ("ar", name, 2),
            ("ssd", name, 2),
        ]
    total = {row["engine"]: row for row in frame["rows"]}
    assert total["ssd"]["set"] == "all"
    assert total["ssd"]["requests"] == 2 * len(frame["set_rows"])
    assert total["ssd"]["same_tokens"] == 1.0
    assert total["ssd"]["speedup"]["ar"] > 0
    assert total["ssd"]["accepted_share"] == 1.0

    lines = [json.loads(line) for line in rounds.read_text().splitlines()]
    assert len(lines) == 2 * total["ssd"]["requests"]
    for line in lines:
        made = sum(r["accepted"] + 1 for r in line["rounds"])
        assert made >= len(line["tokens"]) > made - 3
        assert line["rounds"][0]["chain"] == 0
    asked = [r["hit"] for line in lines for r in line["rounds"] if line["engine"] == "ssd"]
    hits, known = asked.count(True), len(asked) - asked.count(None)
    assert known
    counters = total["ssd"]["counters"]
    assert (hits, known) == (counters["hits"], counters["hits"] + counters["misses"])
    replay = json.loads(trace.read_text())
    assert set(replay) == {"k", "rounds", "pair", "temperature"}
    assert replay["k"] == 2
    assert replay["rounds"]
    assert all(1 <= r["accepted"] == r["chain"] <= 2 for r in replay["rounds"])
    assert not list_runs(str(shm_dir))


def test_a_sweep_then_its_comparison_and_pictures(
    model: Path,
    shm_dir: Path,
    sets: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "sweep.json"
    axes = ["--sweep", "fan_out=1,2,3", "--sweep", "temperature=0,1", "--sweep", "batch=1,2"]
    axes += ["--frames", "own"]
    sizes = ["--datasets", "gsm8k", "--prompts", "2", "--tokens", "10", "--repeats", "1"]
    done = bench(model, shm_dir, sets, output, *axes, *sizes, "--engines", "ar,ssd")
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    swept = found["sweep"]
    assert swept["axes"] == {"fan_out": [1, 2, 3], "temperature": [0.0, 1.0], "batch": [1, 2]}
    points = {(r["engine"], *sorted(r["point"].items())): r for r in swept["rows"]}
    assert len(points) == len(swept["rows"]) == 4 + 12
    for row in swept["rows"]:
        assert row["batch"] == row["point"]["batch"]
        assert row["throughput"] > 0
        if row["engine"] == "ssd":
            assert row["speedup"]["ar"] > 0
            assert row["same_tokens"] == 1.0  # whatever the fan-out, the batch, the temperature
            assert row["hit_rate"] is not None
    assert found["plan"]["params"]["seed"] == 1
    assert found["command"][:2] == ["ssd-pipe", "bench"]
    assert not list_runs(str(shm_dir))

    assert main(["compare", str(output), str(output)]) == 0
    assert capsys.readouterr().out.count("same") >= 16
    assert main(["plot", str(output), "--out", str(tmp_path / "pictures")]) == 0
    made = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert {"report.html", "batch-0.png", "misses-0.svg", "acceptance-0-fan_out.png"} <= made


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--datasets", "gsm9k"], "--datasets: 'gsm9k' is none of"),
        (["--engines", "vllm"], "vllm is not installed here; pip install vllm"),
        (["--server", "mine"], "--server: must look like name=http://HOST:PORT"),
        (["--server", "mine=localhost:8000"], "--server: must look like http://HOST:PORT/v1"),
        (["--sweep", "depth=3"], "--sweep: 'depth' is none of"),
        (["--wandb", "project"], "--wandb: wandb is not installed here: pip install wandb"),
    ],
)
def test_wrong_requests_give_one_line_before_anything_starts(
    arguments: list[str],
    words: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("vllm", "wandb"):  # as if they were not installed
        monkeypatch.setitem(sys.modules, package, None)
    given = ["--target", str(model), "--draft", str(model), "--output", str(tmp_path / "r.json")]
    assert main([*given, *arguments]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert words in line
