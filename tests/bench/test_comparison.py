"""Two results files, compared row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.__main__ import main
from bench.comparison import bootstrap, compare
from bench.loaded import read
from ssd_pipe.errors import ConfigError


def sample(engine: str, prompt: str, rate: float, tokens: int = 11) -> dict[str, Any]:
    arrivals = [[0.5 + i / rate, 1] for i in range(tokens)]
    made: dict[str, Any] = {"engine": engine, "prompt": prompt, "repeat": 0, "set": "s"}
    return {**made, "tokens": list(range(tokens)), "arrivals": arrivals}


def results(path: Path, rates: dict[str, dict[str, float]]) -> Path:
    """A results file with one frame; ``rates`` by engine and prompt."""
    rows = [{"engine": e, "set": "s", "ttft": 500.0, "hit_rate": None} for e in rates]
    samples = [sample(e, p, r) for e, by in rates.items() for p, r in by.items()]
    frame = {"frame": "b", "rows": rows, "samples": samples}
    path.write_text(json.dumps({"version": 1, "frames": [frame]}))
    return path


def test_a_ratio_is_that_of_what_both_have(tmp_path: Path) -> None:
    first = results(tmp_path / "a.json", {"ar": {"p": 10, "q": 20}, "sd": {"p": 10}})
    second = results(tmp_path / "b.json", {"ar": {"p": 20, "q": 40, "r": 1}, "ssd": {"p": 9}})
    [found] = compare(read(first).entries, read(second).entries)
    assert found.prompts == 2
    assert found.ratio == pytest.approx(2.0)
    assert (found.low, found.high) == (pytest.approx(2.0), pytest.approx(2.0))
    assert found.verdict == "faster"
    assert found.same_tokens == 1.0
    assert found.ttft == 1.0


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    generator = np.random.default_rng(5)
    covered = 0
    for trial in range(100):
        seconds = generator.uniform(1, 3, 30)
        a = np.stack([np.full(30, 50.0), seconds], axis=1)
        b = np.stack([np.full(30, 50.0), seconds / 1.2 * generator.lognormal(0, 0.2, 30)], axis=1)
        interval = bootstrap(a, b, trial)
        assert interval is not None
        truth = 1.2 / np.exp(0.02)
        covered += interval[0] <= truth <= interval[1]
    assert 84 <= covered <= 100
    assert bootstrap(a[:1], b[:1], 0) is None


def test_noise_is_called_neither_faster_nor_slower(tmp_path: Path) -> None:
    first = results(tmp_path / "a.json", {"ar": {str(i): 10 + i % 3 for i in range(9)}})
    second = results(tmp_path / "b.json", {"ar": {str(i): 10 + (i + 1) % 3 for i in range(9)}})
    [found] = compare(read(first).entries, read(second).entries)
    assert found.verdict == "same"


def test_the_command_prints_rows_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = results(tmp_path / "a.json", {"ar": {"p": 10, "q": 10}})
    second = results(tmp_path / "b.json", {"ar": {"p": 5, "q": 5}})
    output = tmp_path / "out.json"
    assert main(["compare", str(first), str(second), "--output", str(output)]) == 0
    assert "slower" in capsys.readouterr().out
    [row] = json.loads(output.read_text())
    assert row["ratio"] == pytest.approx(0.5)
    assert row["verdict"] == "slower"


def test_files_without_a_common_row_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = results(tmp_path / "a.json", {"ar": {"p": 10}})
    second = results(tmp_path / "b.json", {"sd": {"p": 5}})
    assert main(["compare", str(first), str(second)]) == 2
    assert "has no row in common with" in capsys.readouterr().err
    assert main(["compare", str(first), str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err
    (tmp_path / "other.json").write_text('{"version": 1}')
    with pytest.raises(ConfigError, match="has no rows"):
        read(tmp_path / "other.json")


def test_files_of_the_repository_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "bench" / "results"
    loaded = read(folder / "2026-11-30-cpu2-frame-b.json")
    assert {e.engine for e in loaded.entries} >= {"ar", "sd", "ssd"}
    same = compare(loaded.entries, loaded.entries)
    assert len(same) == len(loaded.entries)
    assert all(d.ratio == 1 and d.verdict == "same" for d in same)
    # Kept without answers: there is nothing to draw an interval from.
    assert all(d.low is None and not d.prompts for d in same)
