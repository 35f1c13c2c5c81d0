"""The whole benchmark on a tiny model pair: real processes, real transformers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.__main__ import main
from bench.reference import Reference, cache_file
from ipc.rundir import list_runs
from tests.pipelines import byte_model
from tests.waiting import wait_for

TIMEOUT = 170


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {"target": byte_model(folder, "target"), "draft": byte_model(folder, "draft", seed=1)}
    for model in made.values():  # the prompts have a token a byte
        config = model / "config.json"
        settings = {**json.loads(config.read_text()), "max_position_embeddings": 2048}
        config.write_text(json.dumps(settings))
    return made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SSD_CACHE of its own, so that no reference of an earlier run is found."""
    monkeypatch.setenv("SSD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def command(models: dict[str, Path], shm_dir: Path, output: Path, *arguments: str) -> list[str]:
    # The same model drafts for itself: every chain is accepted and every outcome foreseen.
    return [
        *[sys.executable, "-m", "bench", "--target", str(models["target"])],
        *["--draft", str(models["target"]), "--k", "2", "--fan-out", "2", "--output", str(output)],
        *["--set", f"run.shm_dir={shm_dir}", "--log-dir", str(output.parent / "logs"), *arguments],
    ]


def bench(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def test_every_part_side_by_side(
    models: dict[str, Path], shm_dir: Path, cache: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "results.json"
    parts = ["--frames", "b", "--fan-out-table", "--exactness", "3", "--engines", "ssd,assisted"]
    parts += ["--backup", "jit"]  # so that every round has a chain, however fast these models are
    sizes = ["--prompts", "2", "--tokens", "12", "--repeats", "2"]
    grid = ["--allocations", "uniform", "--rules", "shared_noise", "--budgets", "6"]
    done = bench(models, shm_dir, output, *parts, *sizes, *grid)
    assert done.returncode == 0, done.stderr
    assert "frame b" in done.stdout
    assert str(output) in done.stdout
    found = json.loads(output.read_text())

    [frame] = found["frames"]
    rows = {row["engine"]: row for row in frame["rows"]}
    assert set(rows) == {"ssd", "assisted"}
    for row in rows.values():
        assert row["requests"] == 4
        assert row["tok_s"] > 0
        assert row["ttft"] > 0
        assert row["itl_p50"] <= row["itl_p99"]
        assert row["same_tokens"] == 1.0  # greedy in float32: transformers' and ours are the same
        assert row["gb_s"] > 0
    assert rows["ssd"]["accepted_mean"] > 0
    assert rows["ssd"]["overhead"] > 0
    assert len(rows["ssd"]["hit_rate_by_k"]) == 3
    samples = frame["samples"]
    turns = "ssd assisted assisted ssd assisted ssd ssd assisted"  # who begins changes
    assert [s["engine"] for s in samples] == turns.split()
    assert all(sum(n for _, n in s["arrivals"]) == len(s["tokens"]) for s in samples)
    assert frame["engines"]["ssd"]["settings"]["config"]["mode"] == "ssd"
    assert frame["bandwidth"]["copy"] > 0

    cells = {cell["temperature"]: cell for cell in found["fan_out"]}
    assert set(cells) == {0.0, 1.0}
    assert all(cell["branches"] == 6 and cell["rounds"] > 0 for cell in cells.values())

    assert found["exactness"]["passed"] is True
    checks = found["exactness"]["checks"]
    assert [(c["check"], c["batch"]) for c in checks] == [
        ("greedy", 1),
        ("greedy", 8),
        ("sampled", 1),
        ("sampled", 8),
    ]
    assert all(c["equal"] == c["prompts"] == 3 for c in checks)
    assert checks[0]["tokens"] == 3 * 12
    assert found["command"][:2] == ["ssd-pipe", "bench"]
    assert not list_runs(str(shm_dir))


def test_a_token_that_differs_is_shown_and_fails_the_run(
    models: dict[str, Path], shm_dir: Path, cache: Path, tmp_path: Path
) -> None:
    from bench.exactness import greedy_jobs
    from bench.prompts import load
    from bench.reference import prompt_key
    from ssd_pipe.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(models["target"])
    prompts = [(p.id, p.tokens(tokenizer)) for p in load("exactness", 1)]
    [job] = greedy_jobs(prompts, 4)
    # A kept reference with tokens this model does not emit.
    wrong = Reference(tokens=[300, 300, 300, 300], gaps=[0.25, 1.0, 1.0, 1.0])
    path = cache_file(models["target"])
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode({prompt_key(job.tokens, 4): wrong}))

    output = tmp_path / "out" / "results.json"
    arguments = ["--exactness", "1", "--tokens", "4", "--engines", "ar"]
    done = bench(models, shm_dir, output, *arguments)
    assert done.returncode == 1, done.stderr
    assert "differences" in done.stdout
    assert "2.50e-01" in done.stdout
    report = json.loads(output.read_text())["exactness"]
    assert not report["passed"]
    assert {(d["check"], d["batch"], d["position"]) for d in report["differences"]} == {
        ("greedy", 1, 0),
        ("greedy", 8, 0),
    }


def test_term_ends_every_engine(
    models: dict[str, Path], shm_dir: Path, cache: Path, tmp_path: Path
) -> None:
    sizes = ["--frames", "b", "--engines", "ar", "--prompts", "16", "--repeats", "500"]
    running = command(models, shm_dir, tmp_path / "out" / "results.json", *sizes)
    logs = tmp_path / "out" / "logs"
    with subprocess.Popen(running, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            # A finished answer: the engine is up and the comparison under way.
            def answered() -> bool:
                files = logs.glob("*/scheduler.jsonl")
                return any(b'"finish"' in file.read_bytes() for file in files)

            wait_for(lambda: answered() or process.poll() is not None, 90)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                process.kill()
    assert process.returncode == 143
    assert not list_runs(str(shm_dir))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--frames", "z"], "--frames: 'z' is none of: a, b"),
        (["--engines", "vroom"], "--engines: 'vroom' is none of"),
        (["--tokens", "0"], "--tokens: must be at least 1"),
        (["--set", "run.name=x"], "run.name: cannot be set here"),
        (["--k", "99"], "speculation.k: must be 1..32"),
        (["--set", "speculation.kk=1"], "speculation.kk: unknown setting"),
    ],
)
def test_wrong_settings_give_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_a_budget_that_no_fan_out_gives_is_refused_before_anything_starts(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ["--target", str(models["target"]), "--draft", str(models["draft"])]
    output = ["--output", str(tmp_path / "results.json")]
    assert main([*known, *output, "--fan-out-table", "--budgets", "7", "--k", "2"]) == 2
    assert "--budgets: 7 is no multiple of k + 1 = 3" in capsys.readouterr().err
