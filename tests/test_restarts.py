"""Which restarts there are, how long they wait, and single processes of a group that come back."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.messages.hub import ProcessState
from ipc.rundir import RunDir
from ssd_pipe.config import PipelineConfig, config_from_mapping
from ssd_pipe.gateway_address import LISTENER_VARIABLE, inherit_or_listen
from ssd_pipe.group import Blame, ProcessGroup
from ssd_pipe.launch import Launcher
from ssd_pipe.life import Life
from ssd_pipe.restarts import LONGEST_WAIT, RestartBudget, solo_roles
from ssd_pipe.solo import SoloProcesses
from tests.test_supervisor import IDLE, Lines, ending, gone, turn_until


def config(**run: Any) -> PipelineConfig:
    return config_from_mapping({"mode": "ssd", "gateway": {"enabled": True}, "run": run})


def test_a_budget_is_spent_by_restarts_in_a_row_and_refilled_by_service() -> None:
    budget = RestartBudget(3, window=60.0)
    assert [budget.take(served) for served in (5.0, 0.0, 59.9)] == [0.5, 1.0, 2.0]
    assert budget.take(59.9) is None
    assert budget.take(60.0) == 0.5
    assert budget.spent == 1


def test_waits_have_a_limit() -> None:
    budget = RestartBudget(100, window=1e9)
    assert max(budget.take(0.0) or 0.0 for _ in range(100)) == LONGEST_WAIT


@pytest.mark.parametrize(
    ("run", "roles"),
    [
        ({}, {"draft"}),
        ({"on_draft_failure": "fail"}, set()),
        ({"on_failure": "restart"}, {"draft", "gateway"}),
        ({"on_failure": "restart", "on_draft_failure": "fail"}, {"gateway"}),
    ],
)
def test_who_may_go_without_the_group(run: dict[str, str], roles: set[str]) -> None:
    assert solo_roles(config(**run)) == roles


# ---------------------------------------------------------------- single processes


class Idlers(Launcher):
    """Starts a process that does nothing in the place of every one."""

    def start(self, group: ProcessGroup, name: str) -> None:
        group.start(name, [sys.executable, "-S", "-c", IDLE], os.environ)


class Solo:
    """A group of idlers and what looks after the single ones of them, on a clock of its own."""

    def __init__(self, lines: Lines, **run: Any) -> None:
        self.group = ProcessGroup(lines)
        self.config, self.lines = config(**run), lines
        self.launcher = Idlers(self.config, None)
        for name in self.launcher.names:
            self.launcher.start(self.group, name)
        turn_until(self.group, lambda: lines.greeted() == set(self.launcher.names))
        self.processes = SoloProcesses(self.config, self.group, self.launcher, lines, now=0.0)

    def kill(self, name: str, now: float) -> Blame | None:
        os.kill(self.group.pids[name], signal.SIGKILL)
        turn_until(self.group, lambda: self.group.broken)
        return self.processes.lost(*self.group.blame(), now)

    def end(self, name: str, reason: str, peer: str) -> None:
        """Let one end as a process does that misses a peer."""
        self.group.remove(name)
        code = ending(reason, peer)
        self.group.start(name, [sys.executable, "-S", "-c", code], os.environ)
        turn_until(self.group, lambda: name in self.group.exited)

    def serve(self, stopping: Callable[[], bool]) -> Blame | None:
        """The group's life from now on: what ended it."""
        where = "ipc:///nowhere"
        with Life(self.config, self.group, self.launcher, self.lines, where, stopping) as life:
            life.serve()
            return life.blame

    def told(self, name: str, state: str, now: float, pid: int = 0) -> Blame | None:
        pid = pid or self.group.pids[name]
        return self.processes.look([ProcessState(name=name, pid=pid, state=state)], now)


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def make_solo(lines: Lines) -> Iterator[Any]:
    made: list[Solo] = []

    def make(**run: Any) -> Solo:
        made.append(Solo(lines, **run))
        return made[-1]

    yield make
    for solo in made:
        solo.group.tear_down([], 0.1, lambda: True)
        solo.group.close()


def test_a_draft_comes_back_after_a_wait_and_the_others_stay(make_solo: Any, lines: Lines) -> None:
    solo = make_solo()
    before = solo.group.pids
    assert solo.kill("draft", now=10.0) is None
    assert "draft" not in solo.group.pids
    assert not solo.group.broken
    assert solo.processes.turn(10.4) is None
    assert "draft" not in solo.group.pids
    assert solo.processes.turn(10.6) is None
    after = solo.group.pids
    assert after.pop("draft") != before.pop("draft")
    assert after == before
    facts = {"name": "draft", "reason": "draft: was killed by SIGKILL", "seconds": 0.5}
    assert ("restarting", facts) in lines.events


def test_a_draft_that_another_one_misses_is_not_killed_for_it(make_solo: Any, lines: Lines) -> None:
    solo = make_solo()
    draft = solo.group.pids["draft"]
    solo.end("scheduler", "draft: no heartbeat", "draft")
    assert solo.serve(lambda: False) == ("draft", "draft: no heartbeat")
    assert solo.group.pids["draft"] == draft
    assert not gone(draft)
    assert not any(event == "restarting" for event, _ in lines.events)


def test_a_draft_that_misses_another_one_comes_back_alone(make_solo: Any, lines: Lines) -> None:
    solo = make_solo()
    before = solo.group.pids
    solo.end("draft", "scheduler: no heartbeat", "scheduler")
    ended = solo.group.pids["draft"]
    assert solo.serve(lambda: solo.group.pids.get("draft", ended) != ended) is None
    after = solo.group.pids
    assert after.pop("draft") != before.pop("draft")
    assert after == before
    facts = {"name": "draft", "reason": "scheduler: no heartbeat", "seconds": 0.5}
    assert ("restarting", facts) in lines.events


def test_one_that_several_miss_ends_the_group_at_once(make_solo: Any, lines: Lines) -> None:
    solo = make_solo()
    for name in ("draft", "frontend"):
        solo.end(name, "scheduler: no heartbeat", "scheduler")
    assert solo.serve(lambda: False) == ("scheduler", "scheduler: no heartbeat")
    assert not any(event == "restarting" for event, _ in lines.events)


def test_a_draft_that_hangs_is_killed_and_old_news_of_it_is_not_heard(make_solo: Any) -> None:
    solo = make_solo()
    pid = solo.group.pids["draft"]
    os.kill(pid, signal.SIGSTOP)
    assert solo.told("draft", "dead", now=5.0) is None
    assert gone(pid)
    solo.processes.turn(6.0)
    successor = solo.group.pids["draft"]
    assert solo.told("draft", "dead", now=6.1, pid=pid) is None
    assert solo.group.pids["draft"] == successor
    assert not gone(successor)


def test_a_draft_is_given_up_and_the_group_stays(make_solo: Any, lines: Lines) -> None:
    solo = make_solo(max_restarts=1, restart_window=100.0)
    assert solo.kill("draft", now=1.0) is None
    solo.processes.turn(2.0)
    assert solo.kill("draft", now=3.0) is None
    solo.processes.turn(1000.0)
    assert "draft" not in solo.group.pids
    reason = "draft: was killed by SIGKILL (given up, restarts in a row: 1)"
    assert ("given up", {"name": "draft", "reason": reason}) in lines.events


def test_service_refills_the_budget_of_a_process(make_solo: Any) -> None:
    solo = make_solo(max_restarts=1, restart_window=100.0)
    now = 0.0
    for _ in range(3):
        assert solo.kill("draft", now + 1) is None
        solo.processes.turn(now + 2)
        assert solo.told("draft", "ready", now + 3) is None
        now += 200
    assert "draft" in solo.group.pids


def test_a_draft_that_does_not_become_ready_is_replaced(make_solo: Any) -> None:
    solo = make_solo(ready_timeout=20.0)
    solo.kill("draft", now=0.0)
    solo.processes.turn(1.0)
    pid = solo.group.pids["draft"]
    assert solo.processes.turn(20.5) is None
    assert solo.group.pids["draft"] == pid
    assert solo.processes.turn(21.5) is None
    assert gone(pid)


def test_a_gateway_that_does_not_stay_ends_the_group(make_solo: Any) -> None:
    solo = make_solo(on_failure="restart", max_restarts=1)
    assert solo.kill("gateway", now=1.0) is None
    solo.processes.turn(2.0)
    reason = "gateway: was killed by SIGKILL (given up, restarts in a row: 1)"
    assert solo.kill("gateway", now=3.0) == ("gateway", reason)


def test_a_group_can_be_cleared_and_filled_again(make_solo: Any, lines: Lines) -> None:
    solo = make_solo()
    pids = list(solo.group.pids.values())
    assert solo.group.clear()
    assert all(gone(pid) for pid in pids)
    assert solo.group.pids == {}
    lines.lines.clear()
    solo.group.start("draft", [sys.executable, "-S", "-c", IDLE], os.environ)
    turn_until(solo.group, lambda: lines.greeted() == {"draft"})


# ---------------------------------------------------------------- what stays


def test_an_inherited_listening_socket_stays_open_for_the_next_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = config_from_mapping({"gateway": {"port": 0}}).gateway
    with inherit_or_listen(gateway) as listener:
        place = listener.getsockname()
        for _ in range(2):
            monkeypatch.setenv(LISTENER_VARIABLE, str(os.dup(listener.fileno())))
            with inherit_or_listen(gateway) as inherited:
                assert inherited.getsockname() == place
            assert LISTENER_VARIABLE not in os.environ
        with socket.create_connection(place, 5) as client:  # nobody serves, but it is not refused
            assert client.getpeername() == place


def test_wiping_leaves_the_lock_and_the_configuration(shm_dir: Path) -> None:
    with RunDir.create(shm_dir) as run:
        run.config.write_text("{}")
        run.segment("speculation-cache").write_bytes(b"x")
        run.bell("draft.plan").write_bytes(b"")
        (run.path / "folder").mkdir()
        (run.path / "folder" / "file").write_bytes(b"")
        run.wipe()
        assert {path.name for path in run.path.iterdir()} == {".lock", "config.json"}
        with RunDir.open(shm_dir, run.name):
            pass
