from __future__ import annotations

import json
import logging
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ssd_pipe import logs
from ssd_pipe.errors import ResourceError
from ssd_pipe.trace.reading import read_logs


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    logs.close()
    logging.captureWarnings(False)
    root.handlers = handlers


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_has_clock_process_level_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "target-0.jsonl"
    log = logs.configure("target-0", path, pretty=False)
    before = time.monotonic_ns()
    log.info("loaded", blocks=np.int64(7), shape=np.arange(2), path=tmp_path)
    log.info("verify", round=12, rid=[3, 4], start_ns=5)
    first, second = lines(path)
    assert before <= int(str(first["t"])) <= int(str(second["t"])) <= time.monotonic_ns()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", str(first["wall"]))
    assert {k: first[k] for k in ("proc", "level", "event", "blocks", "shape", "path")} == {
        "proc": "target-0",
        "level": "info",
        "event": "loaded",
        "blocks": 7,
        "shape": [0, 1],
        "path": str(tmp_path),
    }
    assert {k: second[k] for k in ("event", "round", "rid", "start_ns")} == {
        "event": "verify",
        "round": 12,
        "rid": [3, 4],
        "start_ns": 5,
    }
    assert path.stat().st_mode & 0o077 == 0


def test_wall_clock_agrees_with_the_system(tmp_path: Path) -> None:
    log = logs.configure("p", tmp_path / "l", pretty=False)
    log.info("now")
    wall = np.datetime64(str(lines(tmp_path / "l")[0]["wall"]).rstrip("Z"), "ms").astype(int)
    assert abs(int(wall) - time.time() * 1000) < 10_000


def test_levels_filter(tmp_path: Path) -> None:
    log = logs.configure("p", tmp_path / "l", "warning", pretty=False)
    log.info("hidden")
    log.warning("shown")
    log.error("shown too")
    assert [r["event"] for r in lines(tmp_path / "l")] == ["shown", "shown too"]


def test_stderr_gets_json_from_warning_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = logs.configure("p", tmp_path / "l", pretty=False)
    log.info("quiet")
    log.warning("loud", n=1)
    log.error("for the file", file_only=True)
    written = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(r["event"], r["n"]) for r in written] == [("loud", 1)]
    assert [r["event"] for r in lines(tmp_path / "l")] == ["quiet", "loud", "for the file"]
    assert all("file_only" not in r for r in lines(tmp_path / "l"))


def test_pretty_lines_are_readable(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    log = logs.configure("draft", None, pretty=True)
    log.info("glue done", k=5)
    text = capfd.readouterr().err
    assert re.match(r"\d\d:\d\d:\d\d\.\d{3} .*info.*glue done.*draft.*k=5", text)


def test_tracebacks_are_kept(tmp_path: Path) -> None:
    log = logs.configure("p", tmp_path / "l", pretty=False)
    try:
        raise ValueError("inner")
    except ValueError:
        log.exception("failed", file_only=True)
    (record,) = lines(tmp_path / "l")
    assert record["level"] == "error"
    assert "ValueError: inner" in str(record["exception"])


def test_warnings_of_libraries_become_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.configure("p", tmp_path / "l", pretty=False)
    logging.getLogger("some.library").warning("careful %d", 3)
    logging.getLogger("some.library").info("chatter")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)  # catch_warnings has just put the plain one back
        logging.captureWarnings(True)
        warnings.warn("old call", DeprecationWarning, stacklevel=1)
    first, second = lines(tmp_path / "l")
    assert (first["event"], first["logger_name"]) == ("careful 3", "some.library")
    assert "old call" in str(second["event"])


def test_a_log_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"log file .*/file/l"):
        logs.configure("p", tmp_path / "file" / "l")


def test_folder_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert logs.log_folder(str(tmp_path), "r") == tmp_path / "r"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert logs.log_folder("", "r") == tmp_path / "ssd-pipe" / "logs" / "r"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert logs.log_folder("", "r") == tmp_path / ".local/state/ssd-pipe/logs/r"
    assert logs.log_folder("~/x", "r") == tmp_path / "x" / "r"


def test_a_line_is_cheap(tmp_path: Path) -> None:
    log = logs.configure("p", tmp_path / "l", pretty=False)

    def cpu_us(count: int = 500) -> float:
        start = time.thread_time()
        for number in range(count):
            log.info("verify", round=number, rid=7, start_ns=1, end_ns=2, k=3)
        return (time.thread_time() - start) / count * 1e6

    assert min(cpu_us() for _ in range(10)) < 20


def test_a_full_file_makes_room_once(tmp_path: Path) -> None:
    path = tmp_path / "draft.jsonl"
    other = tmp_path / "target-0.jsonl"
    other.write_text("{}\n")
    log = logs.configure("draft", path, pretty=False, limit=2000)
    log.info("start", run="r")
    for step in range(100):
        log.info("draft", round=step)
    before = tmp_path / "draft.1.jsonl"
    assert {p.name for p in tmp_path.iterdir()} == {path.name, before.name, other.name}
    assert 1000 < before.stat().st_size <= 2000
    assert path.stat().st_size <= 2000
    steps = [line["round"] for line in [*lines(before), *lines(path)]]
    assert steps == list(range(100 - len(steps), 100))
    read = read_logs(tmp_path)
    assert [event["round"] for event in read.events["draft"]] == steps

    logs.configure("draft", path, pretty=False, limit=2000).info("again")
    assert before.stat().st_size + path.stat().st_size <= 4000


def test_a_file_without_limit_or_taken_away_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "draft.jsonl"
    log = logs.configure("draft", path, pretty=False)
    for step in range(100):
        log.info("draft", round=step)
    assert len(lines(path)) == 100
    log = logs.configure("draft", path, pretty=False, limit=path.stat().st_size + 10)
    path.unlink()
    log.info("first")
    log.info("second")
    assert [line["event"] for line in lines(path)] == ["first", "second"]


def test_logs_of_unnamed_runs_go_when_there_are_too_many(tmp_path: Path) -> None:
    named = ["mine", "run-12345678-kept", "notes"]
    unnamed = [f"run-{i:08x}" for i in range(4)] + ["llm-77-0123abcd"]
    for age, name in enumerate([*named, *unnamed]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scheduler.jsonl").touch()
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    logs.expire(tmp_path, live=["run-00000000"], keep=2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*named, "run-00000000", "run-00000003", "llm-77-0123abcd"}
