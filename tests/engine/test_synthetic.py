"""Replayed acceptance: rates come out, traces are followed, nonsense is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipc.messages import RowOutcome
from ssd_pipe.engine.synthetic import SyntheticOutcomes
from ssd_pipe.errors import ConfigError

REAL = RowOutcome(0, 7)


def known(accepted: int) -> list[int]:
    return [7, 8, 9]


def test_a_rate_gives_that_acceptance_and_hit_rate() -> None:
    synthetic = SyntheticOutcomes("0.8", 0.6, seed=1)
    outcomes = [synthetic.replace(REAL, 4, known) for _ in range(4000)]
    mean = sum(o.accepted for o in outcomes) / len(outcomes)
    assert mean == pytest.approx(sum(0.8**j for j in range(1, 5)), abs=0.08)
    hits = sum(o.token in (7, 8, 9) for o in outcomes) / len(outcomes)
    assert hits == pytest.approx(0.6, abs=0.03)


def test_nothing_cached_is_a_miss_and_keeps_the_real_token() -> None:
    synthetic = SyntheticOutcomes("1", 1.0)
    assert synthetic.replace(REAL, 3, lambda accepted: []) == RowOutcome(3, 7)
    assert synthetic.replace(REAL, 0, known).accepted == 0


def test_a_trace_is_replayed_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"accepted": [2, 9], "hits": [true, false]}')
    synthetic = SyntheticOutcomes(str(path), 0.0)
    got = [synthetic.replace(REAL, 4, known) for _ in range(4)]
    assert [o.accepted for o in got] == [2, 4, 2, 4]
    assert [o.token in (7, 8, 9) for o in got] == [True, False, True, False]


@pytest.mark.parametrize("text", ['{"accepted": [1], "hits": []}', "[]", '{"accepted": [-1]}'])
def test_a_bad_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.json"):
        SyntheticOutcomes(str(path), 0.0)


def test_a_rate_beyond_one_and_a_missing_file_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.\.1"):
        SyntheticOutcomes("1.5", 0.0)
    with pytest.raises(ConfigError, match="neither a rate nor a file"):
        SyntheticOutcomes("no-such-file", 0.0)
