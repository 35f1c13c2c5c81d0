"""Replayed acceptance: rates come out, traces are followed, nonsense is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ipc.messages.target import RowOutcome
from ssd_pipe.engine.synthetic import SyntheticOutcomes
from ssd_pipe.errors import ConfigError

REAL = RowOutcome(0, 7)


def known(accepted: int) -> list[int]:
    return [7, 8, 9]


def trace_file(path: Path, rounds: list[tuple[int, bool, int]], **changes: Any) -> Path:
    fields = {"k": 5, "pair": "a / b", "temperature": 0.7} | changes
    fields["rounds"] = [{"accepted": a, "hit": h, "chain": c} for a, h, c in rounds]
    path.write_text(json.dumps(fields))
    return path


def test_a_rate_gives_that_acceptance_and_hit_rate() -> None:
    synthetic = SyntheticOutcomes("0.8", 0.6, seed=1)
    outcomes = [synthetic.replace(REAL, 4, 0, known) for _ in range(4000)]
    mean = sum(o.accepted for o in outcomes) / len(outcomes)
    assert mean == pytest.approx(sum(0.8**j for j in range(1, 5)), abs=0.08)
    hits = sum(o.token in (7, 8, 9) for o in outcomes) / len(outcomes)
    assert hits == pytest.approx(0.6, abs=0.03)
    assert synthetic.label == "0.8 a token, hit rate 0.6"


def test_nothing_cached_is_a_miss_and_keeps_the_real_token() -> None:
    synthetic = SyntheticOutcomes("1", 1.0)
    assert synthetic.replace(REAL, 3, 0, lambda accepted: []) == RowOutcome(3, 7)
    assert synthetic.replace(REAL, 0, 0, known).accepted == 0


def test_a_trace_is_replayed_in_turn_and_says_what_it_is(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "trace.json", [(2, True, 5), (5, False, 5), (0, True, 4)])
    synthetic = SyntheticOutcomes(str(path), 0.0)
    got = [synthetic.replace(REAL, 5, 3, known) for _ in range(6)]
    assert [o.accepted for o in got] == [2, 5, 0] * 2
    assert [o.token in (7, 8, 9) for o in got] == [True, False, True] * 2
    assert synthetic.label == "trace of a / b, T=0.7, K=5, 3 rounds"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "Expected `object`, got `array`"),
        ('{"k": 5, "pair": "p", "temperature": 0', "truncated"),
        ('{"k": 5, "pair": "p", "temperature": 0, "rounds": []}', "no round with a chain"),
        ('{"k": 0, "pair": "p", "temperature": 0, "rounds": []}', r"k must be 1\.\.32, got 0"),
        ('{"k": 5, "pair": "p", "rounds": []}', "missing required field `temperature`"),
        (
            '{"k": 5, "pair": "p", "temperature": 0, "rounds": '
            '[{"accepted": 1, "hit": true, "chain": 1}, {"accepted": 3, "hit": true, "chain": 2}]}',
            r"rounds\[1\]: .* got 3 of a chain of 2",
        ),
        (
            '{"k": 5, "pair": "p", "temperature": 0, "rounds": [{"accepted": 1, "hit": true}]}',
            r"missing required field `chain` - at `\$\.rounds\[0\]`",
        ),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s)synthetic_acceptance.*trace\.json: .*{reason}"):
        SyntheticOutcomes(str(path), 0.0)


def test_a_rate_beyond_one_and_a_missing_file_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.\.1"):
        SyntheticOutcomes("1.5", 0.0)
    with pytest.raises(ConfigError, match="neither a rate nor a file"):
        SyntheticOutcomes("no-such-file", 0.0)
