"""The table of two GPUs: its rows out of what the parts leave."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest

from bench.gpu_table import command
from bench.gpu_table.parts import PARTS, Outcome
from bench.gpu_table.rows import ROWS, Goal, Line, judge
from bench.gpu_table.run import Content, choose
from ssd_pipe.errors import ConfigError
from tests.bench.gpu_table_data import GREEDY, outcome, outcomes, real, through


def lines(found: dict[str, Outcome], **left_out: str) -> dict[str, Line]:
    return {line.row: line for line in judge(ROWS, found, left_out)}


def printed(content: Sequence[Line]) -> str:
    text = io.StringIO()
    command.plain_console(text).print(command.table(content))
    return text.getvalue()


def test_every_row_is_measured_and_judged() -> None:
    found = lines(outcomes())
    assert {name: (line.text, line.state) for name, line in found.items()} == {
        "ar-8b-step": ("0.83", "met"),
        "ar-8b": ("0.75", "missed"),
        "ar-135m": ("1485 tok/s", "met"),
        "verify-8": ("1.120", "missed"),
        "tree-1b": ("1.143", "met"),
        "hit-leased": ("9.9 us", "met"),
        "hit-scheduler": ("180 us", "missed"),
        "8b-theorem7": ("0.96", "met"),
        "8b-over-sd": ("1.51", "met"),
        "8b-over-ar": ("2.67", "measured"),
        "32b-theorem7": ("0.96", "met"),
        "32b-over-sd": ("1.65", "measured"),
        "32b-over-ar": ("3.41", "measured"),
        "70b-theorem7": ("0.96", "met"),
        "70b-over-sd": ("0.95", "measured"),
        "70b-over-ar": ("4.36", "missed"),
        "real-over-sd": ("1.67", "met"),
        "real-over-ar": ("1.71", "met"),
        "real-t1-over-sd": ("1.67", "met"),
        "real-t1-over-ar": ("1.71", "met"),
        "draft-tree": ("0.600 ms", "met"),
        "hf": ("29.3 tok/s", "measured"),
        "hf-assisted": ("15.4 tok/s", "measured"),
    }
    assert "150 of 200 hits were ready; 82 us between steps" in found["hit-scheduler"].note
    assert "ssd-3-18 2545 tok/s (of K = 3, 5, the best at their end)" in found["real-over-sd"].note
    assert "; sd-4 1526 tok/s (of K = 3, 4, the best at their end)" in found["real-over-sd"].note
    assert "synthetic acceptance: 0.8 a token" in found["8b-theorem7"].note
    assert found["70b-over-ar"].note.endswith("paper 4.68")
    assert found["hf"].note == "beside it: ar 1458, ssd-3-18 2500"


def test_the_table_prints_a_line_for_each_row_and_says_what_is_synthetic() -> None:
    shown = printed(judge(ROWS, outcomes(), {}))
    rows = [line for line in shown.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(ROWS)
    for line in rows:
        if any(name in line for name in ("| 8b-", "| 32b-", "| 70b-")):
            assert "synthetic acceptance" in line
    assert "[synthetic" not in shown  # the note has what is inside the brackets
    assert ">= 0.95" in shown


@pytest.mark.parametrize(
    ("relation", "below", "at", "above"),
    [(">=", False, True, True), ("<=", True, True, False), (">", False, False, True)],
)
def test_a_goal_at_its_limit(relation: Any, below: bool, at: bool, above: bool) -> None:
    goal = Goal(relation, 1.5)
    assert [goal.met(x) for x in (1.49, 1.5, 1.51)] == [below, at, above]
    assert not goal.met(float("nan"))
    assert str(goal) == f"{relation} 1.5"


def test_what_a_part_lacks_fails_its_rows_and_no_others() -> None:
    found = outcomes()
    no_leases = [r | {"stages": r["stages"] | {"leased": 0.0}} for r in real(GREEDY)]
    found["smollm2"] = outcome({"pipeline": no_leases}, failure="exit status 1: FAILED T=1")
    found["steps"] = outcome({"decode": [{"shape": "llama-3.1-8b"}]})
    found["llama70b"] = outcome({}, report={}, failure="not done after 9 s")
    got = lines(found)
    failed = {name: line.note for name, line in got.items() if line.state == "failed"}
    assert failed.keys() == {
        *("hit-leased", "real-t1-over-sd", "real-t1-over-ar"),
        *("ar-8b-step", "verify-8", "tree-1b", "draft-tree"),
        *("70b-theorem7", "70b-over-sd", "70b-over-ar"),
    }
    assert failed["hit-leased"] == ("no engine's rounds were leased; exit status 1: FAILED T=1")
    assert "missing required field" in failed["verify-8"]
    assert failed["70b-over-ar"] == "no engine has a row; not done after 9 s"
    assert got["real-over-sd"].state == "met"
    assert "| failed" in printed(list(got.values()))
    assert Content(lines=list(got.values()), parts=found).status == 1
    whole = outcomes()
    assert Content(lines=judge(ROWS, whole, {}), parts=whole).status == 0


def test_too_few_hits_in_time_say_nothing_of_what_a_hit_takes() -> None:
    found = outcomes() | {"host": outcome({"pipeline": through(GREEDY, 29)})}
    line = lines(found)["hit-scheduler"]
    assert line.state == "failed"
    assert line.note == "ssd-host-3-12, smollm2 T=0: 29 of 200 hits were ready"


def test_rows_of_parts_that_are_left_out_say_why() -> None:
    left_out = choose(PARTS, ROWS, ["verify-8", "transformers", "70b-over-sd"], skip_large=True)
    assert left_out.keys() == {"smollm2", "host", "llama8b", "qwen32b", "llama70b"}
    assert left_out["llama70b"] == "left out by --skip-large"
    found = {n: o for n, o in outcomes().items() if n not in left_out}
    got = judge(ROWS, found, left_out)
    assert {line.part: line.note for line in got if line.state == "not run"} == left_out
    assert Content(lines=got, parts=found).status == 0
    assert choose(PARTS, ROWS, [], skip_large=False) == {}
    with pytest.raises(ConfigError, match="--only: no row or part 9b, x; there are steps, smollm2"):
        choose(PARTS, ROWS, ["9b", "steps", "x"], skip_large=False)
