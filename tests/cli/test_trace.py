"""``ssd-pipe trace`` on the logs of real pipelines, whole and damaged."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ssd_pipe.cli.main import main
from ssd_pipe.client import Client
from ssd_pipe.config_load import load
from ssd_pipe.params import SamplingParams
from ssd_pipe.supervisor import Supervisor
from ssd_pipe.trace.reading import find_logs, read_logs
from ssd_pipe.trace.stages import Summary, summarise
from ssd_pipe.trace.timeline import TimeLine, join
from tests.cli.conftest import PROFILED, Running
from tests.pipelines import byte_model

Trace = Callable[..., str]


@pytest.fixture
def trace(capsys: pytest.CaptureFixture[str]) -> Trace:
    """Run ``ssd-pipe trace``; returns what it printed, on stderr if it must fail."""

    def run(*arguments: str, status: int = 0) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["trace", *arguments])
        out, error = capsys.readouterr()
        assert caught.value.code == status, error
        return error if status else out

    return run


@pytest.fixture
def copy(logs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(logs, tmp_path / "copy")


@pytest.fixture(scope="module")
def line(logs: Path) -> TimeLine:
    return join(read_logs(logs))


@pytest.fixture(scope="module", params=["ar", "sd"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of a pipeline in another mode, ended."""
    folder = tmp_path_factory.mktemp(request.param)
    models = {role: byte_model(folder, role, seed=1) for role in ("target", "draft")}
    settings = {
        "mode": request.param,
        "target.model": str(models["target"]),
        "draft.model": str(models["draft"]),
        "target.threads": 1,
        "run.log_dir": str(folder / "logs"),
    }
    with Supervisor(load(None, settings)) as supervisor, Client(supervisor.endpoint) as client:
        client.generate("abc", SamplingParams(max_tokens=40, ignore_eos=True))
        return supervisor.log_dir


def stages(summary: Summary) -> dict[str, Any]:
    return {stage.name: stage for stage in summary.stages}


def test_the_table_adds_up(logs: Path, running: Running, trace: Trace) -> None:
    summary = json.loads(trace(str(logs), "--json"))
    assert summary["mode"] == "ssd"
    assert summary["run"] == running.supervisor.config.run.name
    assert summary["rounds"] > 10
    by_name = {stage["name"]: stage for stage in summary["stages"]}
    whole = [s for s in summary["stages"] if not s["part_of"] and not s["beside"]]
    assert sum(stage["share"] for stage in whole) == pytest.approx(1, abs=1e-6)
    for name in ("verification", "overhead"):
        parts = [s["share"] for s in summary["stages"] if s["part_of"] == name]
        assert sum(parts) == pytest.approx(by_name[name]["share"], abs=1e-6)
    for stage in summary["stages"]:
        assert 0 <= stage["p50"] <= stage["p99"] <= stage["max"], stage
    for name in ("glue", "depth 1", "depth 2", "wait for backup", "plan -> target"):
        assert by_name[name]["count"] > 0, name
    assert 0 < summary["hidden"] <= 1
    text = trace(str(logs))
    for words in ("mode ssd", "hit rate", "verification", "  forward pass", "  depth 1"):
        assert words in text


def test_hits_and_misses_are_those_counted(line: TimeLine, running: Running) -> None:
    counters = running.client.status().counters
    assert sum(r.hits for r in line.rounds) == counters["hits"] > 0
    assert sum(r.misses for r in line.rounds) == counters["misses"] > 0
    drafted = {draft.number for draft in line.drafts}
    planned = {r.plan for r in line.rounds if r.decoding}
    assert len(planned & drafted) > len(planned) / 2  # the others were overtaken by the next plan
    assert any(len(r.outcomes) == 2 for r in line.rounds)


def test_each_process_has_a_track_and_each_round_its_arrows(
    logs: Path, line: TimeLine, tmp_path: Path, trace: Trace
) -> None:
    file = tmp_path / "trace.json"
    trace(str(logs), "--chrome", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert {"scheduler", "target-0", "draft", "frontend"} <= set(names)
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["tid"] == 1:
            slices[event["pid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    for spans in slices.values():  # of two slices one holds the other, or they do not meet
        open_until: list[float] = []
        for start, end, name in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= start + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, name
            open_until.append(end)
    arrows = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
    for ends in arrows.values():
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        for event in ends.values():
            at = event["ts"]
            assert any(a - 1e-3 <= at <= b + 1e-3 for a, b, _ in slices[event["pid"]]), event
    for each in line.rounds:
        assert f"plan {each.step} target-0" in arrows
        assert f"outcome {each.step} scheduler" in arrows
    assert any(name.startswith("hit ") for name in arrows)


def test_kernels_lie_in_the_steps_that_ran_them(logs: Path, tmp_path: Path, trace: Trace) -> None:
    file = tmp_path / "trace.json"
    trace(str(logs), "--chrome", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    pids = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    target = [e for e in events if e["pid"] == pids["target-0"] and e["ph"] == "X"]
    marks = [e for e in target if e.get("cat") == "user_annotation"]
    own = {e["name"]: e for e in target if e["tid"] == 1 and e["name"].startswith("verify")}
    recorded = [mark for mark in marks if mark["name"].startswith("verify")]
    assert len(recorded) == PROFILED
    for mark in recorded:
        step = own[mark["name"]]
        assert mark["ts"] <= step["ts"] + 1000
        assert mark["ts"] + mark["dur"] >= step["ts"] + step["dur"] - 1000
    first, last = recorded[0]["ts"], recorded[-1]["ts"] + recorded[-1]["dur"]
    operators = [e for e in target if e.get("cat") == "cpu_op"]
    assert operators
    assert all(first - 1000 <= e["ts"] <= last + 1000 for e in operators)
    assert any(e.get("cat") == "cpu_op" and e["pid"] == pids["draft"] for e in events)


def test_a_picture_shows_hits_misses_and_the_rounds_asked_for(
    logs: Path, line: TimeLine, tmp_path: Path, trace: Trace
) -> None:
    file = tmp_path / "rounds.svg"
    trace(str(logs), "--picture", str(file), "--rounds", "100")
    drawn = ElementTree.parse(file).getroot()
    text = " ".join(drawn.itertext())
    for words in ("target-0", "scheduler", "draft", "outcome: hit", "outcome: miss", "glue pass"):
        assert words in text
    first = next(current.step for current, _ in line.steps())
    trace(str(logs), "--picture", str(file), "--rounds", "3", "--from", str(first))
    assert f"rounds {first} to {first + 2}" in file.read_text()
    image = tmp_path / "rounds.png"
    trace(str(logs), "--picture", str(image))
    assert image.read_bytes().startswith(b"\x89PNG")
    assert "--from: no decoding round" in trace(
        str(logs), "--picture", str(image), "--from", "99999", status=2
    )
    assert ".png" in trace(str(logs), "--picture", str(tmp_path / "rounds.bmp"), status=2)


def test_other_modes_have_neither_hits_nor_misses(
    other: Path, tmp_path: Path, trace: Trace
) -> None:
    mode = other.parent.parent.name.rstrip("0123456789")
    summary = summarise(join(read_logs(other)))
    assert summary.mode == mode
    assert summary.hit_rate is None
    assert summary.rounds > 2
    found = stages(summary)
    assert ("backup" in found) == ("wait for backup" in found) == (mode == "sd")
    assert "glue" not in found
    if mode == "sd":
        assert summary.hidden is not None
        assert summary.hidden < 0.5  # what it does once its chain is out
        assert summary.tokens_a_round is not None
        assert summary.tokens_a_round > 1
    file = tmp_path / "rounds.svg"
    trace(str(other), "--picture", str(file), "--chrome", str(tmp_path / "trace.json"))
    assert "outcome" not in file.read_text()


def test_torn_lines_are_left_out(copy: Path, line: TimeLine) -> None:
    for path in copy.glob("*.jsonl"):
        content = path.read_bytes()
        path.write_bytes(b"not a line\n\n[1]\n" + content + content.splitlines()[-1][:-20])
    logs = read_logs(copy)
    assert logs.unreadable == 4 * len(list(copy.glob("*.jsonl")))
    assert len(join(logs).rounds) == len(line.rounds)


@pytest.mark.parametrize("missing", ["draft", "scheduler", "target-0", "frontend"])
def test_a_process_without_a_log_takes_only_its_own(
    missing: str, copy: Path, tmp_path: Path, line: TimeLine, trace: Trace
) -> None:
    (copy / f"{missing}.jsonl").unlink()
    text = trace(str(copy), "--chrome", str(tmp_path / "t.json"))
    assert "verification" in text
    trace(str(copy), "--picture", str(tmp_path / "t.png"))
    assert len(join(read_logs(copy)).rounds) == len(line.rounds)


def test_of_several_runs_in_one_folder_the_last_counts(
    other: Path, copy: Path, line: TimeLine
) -> None:
    for path in copy.glob("*.jsonl"):
        earlier = other / path.name
        before = earlier.read_bytes() if earlier.exists() else b""
        path.write_bytes(before + path.read_bytes())
    gone = [
        {"t": 1, "event": "start"},
        {"t": 2, "event": "verify", "step": 1, "start": 1, "end": 2},
    ]
    (copy / "target-7.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in gone))
    joined = join(read_logs(copy))
    assert summarise(joined) == summarise(line)
    assert "target-7" not in joined.processes


def test_the_latest_run_is_found(running: Running, logs: Path, tmp_path: Path) -> None:
    parent = str(logs.parent)
    assert find_logs("", parent) == find_logs(logs.name, parent) == find_logs(str(logs)) == logs


def test_no_logs_are_one_line(tmp_path: Path, trace: Trace) -> None:
    assert "no logs of any run" in trace("--log-dir", str(tmp_path), status=1)
    assert "no logs of a run" in trace("nothing", "--log-dir", str(tmp_path), status=1)
    (tmp_path / "draft.jsonl").write_bytes(b"\x00garbage\n")
    assert "no readable log lines" in trace(str(tmp_path), status=1)
