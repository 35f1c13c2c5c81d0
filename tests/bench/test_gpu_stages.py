"""Stage times out of logs, and what Theorem 7 makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_stages import bound, read_stages
from bench.rows import Row

MS = 1_000_000


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def logs(
    folder: Path, chains: list[int], hits: list[bool], step_ms: float, waited: int = -1
) -> None:
    """Steps of 4 ms, 1 ms apart, that verify ``chains``; a draft with a glue pass of 2 ms. The
    round of step ``waited`` waits for the draft."""
    starts = [(5 * i) * MS for i in range(len(chains))]
    steps = [
        {"event": "verify", "step": i, "start": at, "end": at + 4 * MS, "tokens": 1 + chain}
        for i, (at, chain) in enumerate(zip(starts, chains, strict=True))
    ]
    rounds = [
        {
            "event": "round",
            "step": i,
            "rows": [{"hit": hit, "chain": chain}],
            "waited": int(i == waited),
        }
        for i, (hit, chain) in enumerate(zip(hits, chains, strict=False))
    ]
    depths = [int((2 + step_ms * (d + 1)) * MS) for d in range(3)]
    draft = {"event": "draft", "start": 0, "backup": 0, "glue": 2 * MS, "depths": depths}
    write(folder / "target-0.jsonl", steps)
    write(folder / "scheduler.jsonl", rounds)
    write(folder / "draft.jsonl", [draft | {"cut": True}])


def row(tokens_per_round: float, hit_rate: float | None) -> Row:
    return Row(
        engine="ssd-3-12",
        requests=1,
        tokens=100,
        tok_s=None,
        tok_s_repeats=[],
        ttft=None,
        itl_p50=None,
        itl_p99=None,
        gap_p99=None,
        tokens_per_round=tokens_per_round,
        round_time=None,
        mb_per_token=None,
        gb_s=None,
        hit_rate=hit_rate,
    )


def test_a_hit_takes_as_long_as_drafting_what_it_verifies(tmp_path: Path) -> None:
    """Chains of 3 and 1 after hits, at 2 ms a step behind a glue pass of 2 ms: 8 and 4 ms."""
    logs(tmp_path, chains=[3, 3, 1, 2], hits=[True, True, False, True], step_ms=2.0)
    stages = read_stages(tmp_path)
    assert (stages.verify_ms, stages.glue_ms, stages.step_ms) == (4.0, 2.0, 2.0)
    assert stages.tree_ms is None
    assert stages.cached_ms == pytest.approx((8 + 4) / 2)
    assert stages.hit_gap_us == pytest.approx(1000)
    assert bound(row(3.0, 1.0), stages) == pytest.approx(1e3 * 3 / 6)


def test_a_draft_that_is_fast_enough_leaves_verification_alone(tmp_path: Path) -> None:
    logs(tmp_path, chains=[3, 3, 3], hits=[True, True, False], step_ms=0.5)
    stages = read_stages(tmp_path)
    assert stages.cached_ms == pytest.approx(4.0)
    assert bound(row(3.0, 1.0), stages) == pytest.approx(1e3 * 3 / 4)


def test_waits_for_the_draft_are_no_part_of_what_a_hit_costs(tmp_path: Path) -> None:
    logs(tmp_path, chains=[3, 3, 3], hits=[True, True, False], step_ms=0.5, waited=1)
    lines = [json.loads(line) for line in (tmp_path / "target-0.jsonl").read_text().splitlines()]
    lines[2]["start"] += 3 * MS
    write(tmp_path / "target-0.jsonl", lines)
    stages = read_stages(tmp_path)
    assert stages.hit_gap_us == pytest.approx(1000)
    assert stages.hit_round_ms == pytest.approx(5)
    assert (stages.hits, stages.hits_ready) == (2, 1)


def test_a_round_that_read_a_prompt_is_none_on_a_hit(tmp_path: Path) -> None:
    logs(tmp_path, chains=[3, 3, 3], hits=[True, True, False], step_ms=0.5)
    lines = [json.loads(line) for line in (tmp_path / "target-0.jsonl").read_text().splitlines()]
    lines[0] |= {"start": -90 * MS, "tokens": 12}
    write(tmp_path / "target-0.jsonl", lines)
    stages = read_stages(tmp_path)
    assert stages.hit_round_ms == pytest.approx(5)
    assert (stages.hits, stages.hits_ready) == (1, 1)


def test_without_a_cache_drafting_adds_to_verification(tmp_path: Path) -> None:
    logs(tmp_path, chains=[3, 3], hits=[False, False], step_ms=0.5)
    stages = read_stages(tmp_path)
    assert stages.cached_ms is None
    stages.backup_ms = 2.0
    assert bound(row(3.0, None), stages) == pytest.approx(1e3 * 3 / 6)
