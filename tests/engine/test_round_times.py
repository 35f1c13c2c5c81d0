"""What counts as overhead between two verifications."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ipc.messages.target import Found, StepResult
from ssd_pipe.engine.round_times import RoundTimes


def result(start_ms: float, end_ms: float) -> StepResult:
    start, end = int(start_ms * 1e6), int(end_ms * 1e6)
    return StepResult(1, [], start, end - 1000, end)


def test_gaps_count_without_the_waits_for_the_draft_and_without_idle_spells() -> None:
    times = RoundTimes()
    wholes = [times.step(result(0, 10), 6)]
    wholes.append(times.step(result(11, 20), 6))  # a gap of 1 ms
    times.waited(0.004)
    wholes.append(times.step(result(25, 30), 6))  # 5 ms, 4 of which waited for the draft
    times.idle()
    wholes.append(times.step(result(500, 510), 1))
    assert wholes == pytest.approx([0, 0.010, 0.010, 0])
    assert times.overhead_rounds == 2
    assert times.overhead_seconds == pytest.approx(0.002)
    assert times.overhead_at[10] == 2  # both of 1.0 to 1.1 ms
    assert times.verify_seconds == pytest.approx(0.034)
    assert (times.steps, times.tokens_fed) == (4, 19)


@pytest.mark.parametrize("found", [[], [Found([4], 0)]])
def test_a_wait_of_the_targets_own_is_no_overhead(found: list[Found]) -> None:
    """Whether it was in vain or not."""
    times = RoundTimes()
    first = replace(result(0, 10), found=found, looked_up_ns=int(10.1e6), waited_ns=int(12.6e6))
    times.step(first, 6)
    times.target_waited(first)
    second = result(13, 20)
    times.step(second, 6)
    times.target_waited(second)
    assert times.overhead_seconds == pytest.approx(0.0005)
    assert times.depth_wait_seconds == pytest.approx(0.0025)
