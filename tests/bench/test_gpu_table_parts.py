"""The parts of the table of two GPUs as processes, and its command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from bench import gpu_pipeline
from bench.gpu_table import command, run
from bench.gpu_table.figures import Figure, Missing
from bench.gpu_table.parts import PARTS, Outcome, Part
from bench.gpu_table.rows import ROWS, Goal, Row, judge
from bench.gpu_table.run import Content, measure, opened
from bench.results import write
from ssd_pipe.errors import ConfigError, ResourceError
from tests.bench.gpu_table_data import outcomes
from tests.waiting import wait_for

GOOD = """
import json, sys
value = float(sys.argv[1])
assert sys.argv[2] == "--output"
json.dump({"value": value, "sections": {}}, open(sys.argv[3], "w"))
"""
BROKEN = "print('FAILED llama8b: out of memory'); print('bye'); raise SystemExit(3)"
HANGING = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def part(name: str, script: str, *arguments: str, seconds: float = 30.0) -> Part:
    return Part(name=name, command=("-S", "-c", script, *arguments), seconds=seconds)


def value(outcome: Outcome) -> Figure:
    if "value" not in outcome.report:
        raise Missing("no value")
    return Figure(outcome.report["value"])


def test_a_part_that_fails_or_hangs_leaves_the_others_their_rows(tmp_path: Path) -> None:
    parts = [
        part("broken", BROKEN),
        part("silent", ""),
        part("hanging", HANGING, seconds=2 / run.PATIENCE),
        part("later", GOOD, "1", seconds=1e6),
        part("good", GOOD, "7"),
    ]
    found: dict[str, Outcome] = {}
    told: list[str] = []
    saved: list[int] = []
    left_out = measure(
        parts, found, tmp_path / "logs", 4e12, 600.0, told.append, lambda: saved.append(len(found))
    )
    assert {name: o.failure for name, o in found.items()} == {
        "broken": "exit status 3: FAILED llama8b: out of memory",
        "silent": "left no results",
        "hanging": f"not done after 2 s: {_child(tmp_path)}",
        "good": "",
    }
    assert left_out.keys() == {"later"}
    assert left_out["later"].startswith("takes about 1e+06 s, ")
    assert saved == [1, 2, 3, 4]
    assert told[:2] == [
        "broken: takes about 30 s",
        f"broken: FAILED, {found['broken'].failure}, after {found['broken'].seconds:.0f} s",
    ]
    wait_for(lambda: not _alive(_child(tmp_path)), 10)
    rows = [Row(p.name, p.name, p.name, value, Goal(">", 6)) for p in parts]
    states = [line.state for line in judge(rows, found, left_out)]
    assert states == ["failed", "failed", "failed", "not run", "met"]


def _child(folder: Path) -> int:
    return int((folder / "logs" / "hanging.out").read_text().split()[0])


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_results_of_an_earlier_run_are_no_results(tmp_path: Path) -> None:
    found: dict[str, Outcome] = {}
    for script in (GOOD, BROKEN):
        measure([part("p", script, "7")], found, tmp_path, 1.0, None, str, time.monotonic)
    assert found["p"].report == {}
    assert found["p"].failure.startswith("exit status 3")


def test_a_call_goes_on_with_the_file_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to measure, so that no GPU is asked for."""
    path = tmp_path / "table.json"
    found = outcomes()
    write(path, Content(parts=found))
    assert command.main(["--resume", "--output", str(path)]) == 0
    assert "| hf-assisted" in capsys.readouterr().out
    kept = opened(path)
    assert [line.row for line in kept.lines] == [row.name for row in ROWS]
    assert kept.parts == found
    monkeypatch.setattr(command, "missing", lambda gpus: f"lacks {gpus}")
    with pytest.raises(ResourceError, match="lacks 2"):  # measured without the setting
        command.main(["--resume", "--set", "run.cpus=[1]", "--output", str(path)])
    found["steps"].failure = "exit status 1"
    write(path, Content(parts=found))
    with pytest.raises(ResourceError, match="lacks 1"):
        command.main(["--resume", "--output", str(path)])
    assert command.main(["--resume", "--only", "llama8b", "--output", str(path)]) == 1
    with pytest.raises(ResourceError, match="lacks 2"):
        command.main(["--output", str(path)])
    path.write_text("{")
    with pytest.raises(ResourceError, match="not a file of this program"):
        command.main(["--resume", "--output", str(path)])


TABLE = """
import sys
from pathlib import Path
from bench.gpu_table.parts import Part
from bench.gpu_table.run import measure
hanging = Part(name="hanging", command=("-S", "-c", sys.argv[1]), seconds=600)
measure([hanging], {}, Path(sys.argv[2]), 1.0, None, print, lambda: None)
"""


def test_an_interrupt_ends_the_part_as_well(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TABLE, HANGING, str(tmp_path / "logs")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    out = tmp_path / "logs" / "hanging.out"
    wait_for(lambda: out.exists() and bool(out.read_text().strip()), 60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in said
    wait_for(lambda: not _alive(_child(tmp_path)), 10)


def test_what_a_dry_run_on_cpus_leaves_can_be_read(tmp_path: Path, shm_dir: Path) -> None:
    """Real engines one by one, and one that there is not, which costs the others nothing."""
    output = tmp_path / "tiny.json"
    given = [
        *("--pair", "tiny", "--one-by-one", "--engines", "foo", "ar", "ssd-3-12"),
        *("--target-device", "cpu", "--draft-device", "cpu", "--prompts", "1", "--tokens", "40"),
        *("--max-model-len", "300", "--shm-dir", str(shm_dir)),
        *("--log-dir", str(tmp_path / "logs"), "--output", str(output)),
    ]
    assert gpu_pipeline.main(given) == 1
    report = msgspec.json.decode(output.read_bytes(), type=dict[str, Any])
    [failed] = report["failed"]
    assert failed.endswith(": foo")
    assert report["origin"]["command"][:3] == ["python", "-m", "bench.gpu_pipeline"]
    found = Outcome(command=[], started="", seconds=1.0, bandwidth=1e10, report=report)
    rows = [row for row in ROWS if row.part == "llama8b"]
    judged = judge(rows, {"llama8b": found}, {})
    values = {line.row: line.value for line in judged}
    assert values.pop("8b-over-sd") is None
    assert values.keys() == {"ar-8b", "8b-theorem7", "8b-over-ar"}
    assert all(value is not None and value > 0 for value in values.values())
    assert "0.8 a token, hit rate 0.86, not published, assumed" in judged[1].note
    assert not list(shm_dir.glob("*/*"))


# ------------------------------------------------------------ the command


def table(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-m", "bench.gpu_table", *arguments]
    return subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_without_gpus_it_says_what_is_missing(tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    done = table("--output", str(output))
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: this table needs 2 CUDA devices, torch ")
    assert line.endswith(" sees 0 here")
    assert done.stdout == ""
    assert not output.exists()


def test_wrong_options_are_named() -> None:
    for given, reason in (
        (["--only", "speed"], "--only: no row or part speed"),
        (["--minutes", "-1"], "--minutes: must be at least 0, got -1"),
        (["--set", "draft"], "--set: must look like section.key=value"),
    ):
        with pytest.raises(ConfigError, match=reason):
            command.main(given)


def test_the_plan_names_every_part_with_its_time_and_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["--list"]) == 0
    shown = capsys.readouterr().out
    for one in PARTS:
        assert f"| {one.name} " in shown
    assert all(row.name in shown for row in ROWS)


def test_rows_and_parts_fit() -> None:
    names = [part.name for part in PARTS]
    assert {row.part for row in ROWS} == set(names)
    everything = [*names, *(row.name for row in ROWS)]
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("name", [p.name for p in PARTS if "bench.gpu_pipeline" in p.command])
def test_a_parts_engines_can_be_configured(name: str) -> None:
    [one] = [p for p in PARTS if p.name == name]
    args = gpu_pipeline.arguments([*one.command[2:], "--output", "x.json"])
    [pair] = args.pair
    for engine_name in args.engines:
        if engine_name.startswith("hf"):
            continue
        config = gpu_pipeline.config_of(pair, engine_name, args)
        mode, *numbers = engine_name.replace("-host", "").split("-")
        assert config.mode == mode
        if numbers:
            assert config.speculation.k == int(numbers[0])
        assert bool(config.speculation.synthetic_acceptance) == (pair != "smollm2")
    if pair == "llama70b":
        assert config.speculation.synthetic_acceptance == "0.87"
        assert sum(msgspec.to_builtins(config.speculation.fan_out)) == int(numbers[1])


def test_settings_reach_the_pipelines_of_a_part_and_nothing_else() -> None:
    settings = ["draft.cpus=[4, 5]", "run.log_level=debug"]
    for one in PARTS:
        given = one.with_settings(settings)
        if "bench.gpu_pipeline" not in one.command:
            assert given == one
            continue
        args = gpu_pipeline.arguments([*given.command[2:], "--output", "x.json"])
        config = gpu_pipeline.config_of(args.pair[0], "ssd-3-12", args)
        assert config.draft.cpus == [4, 5]
        assert config.run.log_level == "debug"


def test_the_steps_of_the_first_part_can_be_asked_for() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from bench.gpu_model import arguments

    [one] = [p for p in PARTS if p.name == "steps"]
    args = arguments([*one.command[2:], "--output", "x.json"])
    assert args.sections == ["models"]
    assert args.models == [
        "smollm2-draft-16m",
        "llama-3.2-1b",
        "llama-3.1-8b",
    ]
