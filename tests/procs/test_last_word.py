"""What a process of a run says last arrives, however it and the others are scheduled."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from procs.hub_link import FLUSH_MS


def start(make_group: Any, **behaviours: str) -> Any:
    group = make_group(mode="ssd")
    group.start_all(**behaviours)
    group.until_ready()
    return group


def others(group: Any) -> list[str]:
    return [name for name in group.names if name != "scheduler"]


@pytest.mark.parametrize("attempt", range(2))
def test_a_scheduler_that_exits_at_once_has_told_everybody(make_group: Any, attempt: int) -> None:
    group = start(make_group, scheduler="hasty")
    group.members["scheduler"].send_signal(signal.SIGTERM)
    for name in others(group):
        assert group.hear(name, "stopping")["reason"] == "SIGTERM"
    for name in group.names:
        assert group.end(name) == (0, "")


def test_those_who_stand_still_meanwhile_are_told_and_not_waited_for(make_group: Any) -> None:
    group = start(make_group, scheduler="hasty")
    for name in others(group):
        group.members[name].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    group.members["scheduler"].send_signal(signal.SIGTERM)
    assert group.end("scheduler") == (0, "")
    assert time.monotonic() - begun < FLUSH_MS / 1000
    for name in others(group):
        group.members[name].send_signal(signal.SIGCONT)
        assert group.end(name) == (0, "")


def test_a_process_that_exits_at_once_has_said_why(make_group: Any) -> None:
    group = make_group()
    group.start_all(target="hasty")
    assert group.end("scheduler") == (1, "error: target-0: in a hurry\n")


def test_nobody_waits_to_tell_a_scheduler_that_is_gone(make_group: Any) -> None:
    group = start(make_group)
    group.members["scheduler"].kill()
    for name in others(group):
        assert group.end(name) == (1, "error: scheduler: connection closed\n")
        said = {record["event"]: record["t"] for record in group.log(name)}
        assert said["exit"] - said["scheduler: connection closed"] < FLUSH_MS * 1_000_000
