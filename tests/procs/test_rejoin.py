"""Processes that may go and come back while the group stays."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.waiting import wait_for


def states(told: dict[str, Any]) -> dict[str, str]:
    return {state["name"]: state["state"] for state in told["states"]}


def test_a_killed_draft_is_missed_and_another_takes_its_place(make_group: Any) -> None:
    group = make_group(mode="ssd")
    group.start_all()
    assert group.until_ready()["draft"]["returning"] is False
    first = group.members["draft"]
    first.kill()
    told = group.hear("scheduler", "absent")
    assert told["reason"] == f"draft: process {first.pid} died"
    assert states(told) == {
        "scheduler": "ready",
        "frontend": "ready",
        "target-0": "ready",
        "draft": "dead",
    }
    second = group.start("draft", key="second")
    ready = group.hear("second", "ready")
    assert (ready["group"], ready["returning"]) == ({"answer": 42}, True)
    told = group.hear("scheduler", "back")
    assert set(states(told).values()) == {"ready"}
    assert {s["pid"] for s in told["states"] if s["name"] == "draft"} == {second.pid}
    # Its loss is noticed like that of the first one, and the group still ends in order.
    second.send_signal(signal.SIGTERM)
    assert group.hear("scheduler", "absent")["reason"] == f"draft: process {second.pid} died"
    group.members["scheduler"].send_signal(signal.SIGTERM)
    assert group.end("scheduler")[0] == group.end("frontend")[0] == 0


def test_a_draft_that_says_why_it_fails_is_quoted(make_group: Any) -> None:
    group = make_group(mode="ssd")
    group.start_all()
    group.until_ready()
    group.members["draft"].kill()
    group.hear("scheduler", "absent")
    group.start("draft", "bug", key="second")
    assert group.end("second") == (1, "error: ValueError: two lines\n")
    wait_for(
        lambda: any(
            r["event"] == "lost" and r["reason"] == "ValueError: two lines"
            for r in group.log("scheduler")
        )
    )
    assert group.members["scheduler"].poll() is None


def test_the_place_of_a_draft_that_hangs_is_free_once_it_is_gone(make_group: Any) -> None:
    group = make_group(mode="ssd", beat_timeout=1.0)
    group.start_all()
    group.until_ready()
    first = group.members["draft"]
    os.kill(first.pid, signal.SIGSTOP)
    assert group.hear("scheduler", "absent")["reason"] == "draft: no heartbeat for 1 s"
    group.start("draft", key="early")
    status, stderr = group.end("early")
    assert status == 1
    assert f"refused draft: draft is there already and hangs (pid {first.pid})" in stderr
    first.kill()
    first.communicate()
    group.start("draft", key="second")
    group.hear("second", "ready")
    group.hear("scheduler", "back")


def test_a_draft_that_must_not_fail_takes_the_group_down(make_group: Any) -> None:
    group = make_group(mode="ssd", on_draft_failure="fail")
    group.start_all()
    group.until_ready()
    pid = group.members["draft"].pid
    group.members["draft"].kill()
    assert group.hear("scheduler", "lost")["reason"] == f"draft: process {pid} died"
    assert group.end("scheduler")[0] == 1


def test_a_draft_that_fails_before_the_group_is_ready_ends_it(make_group: Any) -> None:
    group = make_group(mode="ssd")
    group.start("scheduler")
    group.start("draft", "bug")
    assert group.end("scheduler") == (1, "error: draft: ValueError: two lines\n")
