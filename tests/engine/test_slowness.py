from __future__ import annotations

import random

import pytest

from ssd_pipe.engine.slowness import CLIP, FOLLOW, SETTLED, Slowness


def steps(slowness: Slowness, kind: str, seconds: float, count: int, noise: float = 0.1) -> None:
    rng = random.Random(count)
    for _ in range(count):
        slowness.observe(kind, seconds * rng.lognormvariate(0, noise))


def test_the_same_times_are_no_slowness() -> None:
    slowness = Slowness()
    for _ in range(100):
        slowness.observe("short", 1.0)
        slowness.observe("long", 7.0)
    assert slowness.now == pytest.approx(1.0)


@pytest.mark.parametrize("factor", [1.4, 0.7])
def test_one_kind_tells_for_all(factor: float) -> None:
    slowness = Slowness()
    for _ in range(10):
        steps(slowness, "short", 1.0, 10)
        steps(slowness, "long", 7.0, 10)
    before = slowness.now
    assert before == pytest.approx(1.0, abs=0.1)
    steps(slowness, "long", 7.0 * factor, 25)
    assert slowness.now / before == pytest.approx(factor, rel=0.15)
    steps(slowness, "short", 1.0, 25)
    assert slowness.now / before == pytest.approx(1.0, abs=0.15)


def test_an_accident_says_little_and_what_is_new_nothing() -> None:
    slowness = Slowness()
    steps(slowness, "short", 1.0, 50, noise=0.0)
    slowness.observe("short", 100.0)
    assert slowness.now == pytest.approx(CLIP**FOLLOW)
    before = slowness.now
    for number in range(SETTLED):
        slowness.observe("new", 5.0 + number)
    assert slowness.now == before
