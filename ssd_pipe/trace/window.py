"""Which rounds of a run a picture shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd_pipe.errors import ConfigError
from ssd_pipe.trace.timeline import Round, TimeLine


def choose_rounds(line: TimeLine, count: int, first: int | None = None) -> list[Round]:
    """``count`` decoding rounds in a row, fewer if there are not as many.

    Args:
        line: the run.
        count: rounds wanted.
        first: step number of the first one; None takes the rounds that are most like the run:
            those whose misses, of all of them, and whose time are nearest to the run's own.

    Raises ConfigError if there is no such step, or no decoding round at all.
    """
    runs = _unbroken(line)
    if first is not None:
        runs = [run[at:] for run in runs for at, r in enumerate(run) if r.step == first]
        if not runs:
            raise ConfigError("--from", f"no decoding round has step {first}")
        return runs[0][:count]
    if not runs:
        raise ConfigError("--picture", "the logs hold no two decoding rounds in a row")
    longest = max(map(len, runs))
    windows = [
        run[at : at + count]
        for run in runs
        for at in range(max(1, len(run) - count + 1))
        if len(run) >= min(count, longest)
    ]
    rounds = [each for run in runs for each in run]
    usual = _time(rounds) / len(rounds)
    misses = sum(r.misses for r in rounds) / len(rounds)

    def distance(window: Sequence[Round]) -> tuple[float, float]:
        # At least one miss, if the run has any: it is what a picture is looked at for.
        expected = max(misses * len(window), float(misses > 0))
        own = sum(r.misses for r in window)
        return round(abs(own - expected)), abs(_time(window) / len(window) - usual)

    return min(windows, key=distance)


def _unbroken(line: TimeLine) -> list[list[Round]]:
    """Stretches of decoding rounds, each of which follows the one before at once."""
    stretches: list[list[Round]] = []
    for current, following in line.steps():
        if not stretches or stretches[-1][-1] is not current:
            stretches.append([current])
        stretches[-1].append(following)
    return stretches


def _time(rounds: Sequence[Round]) -> float:
    return float(np.sum([r.end - r.start for r in rounds]))
