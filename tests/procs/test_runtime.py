"""The life of a group of real processes around runtime and hub, and every way it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ipc.rundir import list_runs
from procs.hub import expected_names
from procs.liveness import Pulse, StopFlag, Stopping
from ssd_pipe.config import PipelineConfig, TargetSection
from ssd_pipe.last_words import LastWords
from tests.procs.group import MEMBERS, Group
from tests.waiting import wait_for


def test_a_group_comes_up_and_goes_down_in_order(make_group: Any) -> None:
    group = make_group()
    for name in reversed(MEMBERS):  # the hub last: the others wait for it
        group.start(name)
    told = group.until_ready()
    assert told["frontend"]["group"] == told["target-0"]["group"] == {"answer": 42}
    assert {t["transport"] for t in told.values()} == {"shm"}
    facts = told["scheduler"]["facts"]
    assert list(facts) == ["frontend", "target-0"]
    assert facts["frontend"] == {"rank": 0, "threads": 1}
    states = {s["name"]: (s["state"], s["pid"]) for s in told["scheduler"]["states"]}
    assert states == {name: ("ready", group.members[name].pid) for name in MEMBERS}
    assert list_runs(group.shm_dir) == ["r"]
    comm = Path(f"/proc/{group.members['target-0'].pid}/comm").read_text().strip()
    assert comm == "ssd-target-0"

    group.members["scheduler"].send_signal(signal.SIGTERM)
    for name in ("frontend", "target-0"):
        assert group.hear(name, "stopping")["reason"] == "SIGTERM"
    assert [group.end(name) for name in MEMBERS] == [(0, "")] * 3
    events = [line["event"] for line in group.log("scheduler")]
    assert events[:2] == ["start", "transport"]
    assert sorted(events[2:6]) == ["connected", "connected", "peer ready", "peer ready"]
    assert events[-1] == "exit"
    assert {line["proc"] for line in group.log("target-0")} == {"target-0"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_process_in_order(make_group: Any, number: int) -> None:
    group = make_group()
    group.start_all()
    group.until_ready()
    for name in MEMBERS:
        group.members[name].send_signal(number)
    assert [group.end(name)[0] for name in MEMBERS] == [0, 0, 0]


def test_killed_worker_is_noticed_at_once(make_group: Any) -> None:
    group = make_group()
    group.start_all()
    group.until_ready()
    worker = group.members["target-0"]
    worker.kill()
    told = group.hear("scheduler", "lost")
    assert told["reason"] == f"target-0: process {worker.pid} died"
    assert {s["name"]: s["state"] for s in told["states"]}["target-0"] == "dead"
    status, stderr = group.end("scheduler", 8)  # sooner than the silence of beat_timeout
    assert status == 1
    assert stderr == f"error: target-0: process {worker.pid} died\n"
    assert group.hear("frontend", "stopping")["reason"] == stderr[7:].strip()
    assert group.end("frontend")[0] == 0


def test_killed_scheduler_is_noticed_at_once(make_group: Any) -> None:
    group = make_group()
    group.start_all()
    group.until_ready()
    group.members["scheduler"].kill()
    for name in ("frontend", "target-0"):
        status, stderr = group.end(name, 8)
        assert status == 1
        assert stderr == "error: scheduler: connection closed\n"


def test_kill_9_of_the_whole_group(make_group: Any) -> None:
    group = make_group()
    group.start_all()
    group.until_ready()
    for member in group.members.values():
        member.kill()
    wait_for(lambda: list_runs(group.shm_dir) == [])


@pytest.mark.parametrize(
    ("behaviour", "line"),
    [("bad-config", "target.model: no such folder"), ("bug", "ValueError: two lines")],
)
def test_a_failing_process_ends_the_group_with_its_own_words(
    make_group: Any, behaviour: str, line: str
) -> None:
    group = make_group()
    group.start("scheduler")
    group.start("frontend")
    group.hear("scheduler", "listening")
    wait_for(lambda: any(r["event"] == "connected" for r in group.log("scheduler")))
    group.start("target-0", behaviour)
    status, stderr = group.end("target-0")
    assert status == 1
    assert stderr == f"error: {line}\n"
    assert group.end("scheduler") == (1, f"error: target-0: {line}\n")
    assert group.end("frontend") == (0, "")  # told to shut down while it waited for the group
    record = next(r for r in group.log("target-0") if r["level"] == "error")
    assert record["event"] == line
    assert ("exception" in record) == (behaviour == "bug")


def test_a_stuck_worker_is_noticed(make_group: Any) -> None:
    group = make_group(beat_timeout=1.0)
    group.start_all(target="stuck")
    group.until_ready()
    assert group.hear("scheduler", "lost")["reason"] == "target-0: no heartbeat for 1 s"
    assert group.end("scheduler") == (1, "error: target-0: no heartbeat for 1 s\n")
    assert group.end("frontend")[0] == 0


def words_of_scheduler(group: Any, target: str) -> LastWords | None:
    """What it says last when a supervisor has started it."""
    group.start("frontend")
    group.start("target-0", target)
    group.start("scheduler", SSD_SUPERVISOR_PID=str(os.getpid()))
    status, stderr = group.end("scheduler")
    assert status == 1
    (line,) = stderr.splitlines()
    return LastWords.read(line)


def test_a_supervisor_is_told_the_name_of_a_stuck_process(make_group: Any) -> None:
    words = words_of_scheduler(make_group(beat_timeout=1.0), "stuck")
    assert words == ("target-0: no heartbeat for 1 s", "target-0")


def test_the_process_that_another_one_misses_is_told_on(make_group: Any) -> None:
    words = words_of_scheduler(make_group(), "misses-frontend")
    assert words == ("target-0: nothing comes from over there", "frontend")


def test_a_stuck_scheduler_is_noticed(make_group: Any) -> None:
    group = make_group(beat_timeout=1.0)
    group.start_all(scheduler="stuck")
    group.until_ready()
    for name in ("frontend", "target-0"):
        assert group.end(name) == (1, "error: scheduler: no heartbeat for 1 s\n")


def all_members(group: Any, number: int, *names: str) -> None:
    for name in names or group.names:
        group.members[name].send_signal(number)


def assert_goes_on(group: Any) -> None:
    """For longer than the silence after which anybody is missed, and to an orderly end."""
    with pytest.raises(subprocess.TimeoutExpired):
        group.members["scheduler"].wait(1.5)
    assert not any(record["event"] == "lost" for record in group.log("scheduler"))
    all_members(group, signal.SIGTERM, "scheduler")
    for name in group.names:
        assert group.end(name) == (0, "")


def test_a_machine_that_stands_still_is_no_loss(make_group: Any) -> None:
    """Each process finds that the others were silent, while it could not listen either."""
    group = make_group(beat_timeout=1.0)
    group.start_all()
    group.until_ready()
    stop_for(group, 2.5)
    assert_goes_on(group)


def test_a_machine_that_stands_still_delays_no_start(make_group: Any) -> None:
    """While a process waits for the scheduler, and while these two wait for a third one."""
    group = make_group(ready_timeout=4.0)
    group.start("frontend")
    wait_for(lambda: bool(list(group.folder.glob("logs/r/frontend.jsonl"))))
    stop_for(group, 4.5, "frontend")
    group.start("scheduler")
    group.hear("scheduler", "listening")
    wait_for(lambda: any(r["event"] == "connected" for r in group.log("scheduler")))
    stop_for(group, 4.5, "scheduler", "frontend")
    group.start("target-0")
    for name in group.names:
        group.hear(name, "ready")
    assert_goes_on(group)


def stop_for(group: Any, seconds: float, *names: str) -> None:
    all_members(group, signal.SIGSTOP, *names)
    time.sleep(seconds)
    all_members(group, signal.SIGCONT, *names)


def test_those_who_are_silent_together_get_one_more_interval(make_group: Any) -> None:
    def excuses() -> int:
        return sum(record["event"] == "silent together" for record in group.log("scheduler"))

    group = make_group(beat_timeout=1.0)
    group.start_all()
    group.until_ready()
    others = [name for name in group.names if name != "scheduler"]
    for number in (1, 2):
        all_members(group, signal.SIGSTOP, *others)
        wait_for(lambda number=number: excuses() == number)
        all_members(group, signal.SIGCONT, *others)
        with pytest.raises(subprocess.TimeoutExpired):
            group.members["scheduler"].wait(0.6)  # beats come that end the excuse
    all_members(group, signal.SIGSTOP, *others)
    reason = group.hear("scheduler", "lost")["reason"]
    assert reason.endswith("no heartbeat for 1 s")
    assert excuses() == 3
    all_members(group, signal.SIGKILL, *others)


def test_second_of_a_name_other_config_and_strangers_are_refused(make_group: Any) -> None:
    group = make_group()
    group.start("scheduler")
    group.start("target-0", "never-ready")
    group.hear("target-0", "loading")
    pid = group.members["target-0"].pid
    group.start("target-0", key="second")
    group.start("frontend", "other-config", key="other")
    group.start("draft", key="stranger")
    for key, reason in (
        ("second", f"refused target-0: target-0 is connected already (pid {pid})"),
        ("other", "refused frontend: it was started with another configuration"),
        ("stranger", "refused draft: this run has no process 'draft', it has frontend, target-0"),
    ):
        status, stderr = group.end(key)
        assert status == 1
        assert f"error: the scheduler {reason}" in stderr
    # None of this harmed the group: it still becomes ready with the right ones.
    group.members["target-0"].send_signal(signal.SIGTERM)
    assert group.end("target-0") == (0, "")


def test_a_run_on_a_disk_is_warned_of_where_nobody_supervises(
    disk_dir: Path, tmp_path: Path
) -> None:
    group = Group(tmp_path, disk_dir)
    group.start("scheduler")
    group.hear("scheduler", "listening")
    events = [record["event"] for record in group.log("scheduler")]
    assert sum(event.startswith(f"run.shm_dir: {disk_dir} is on ") for event in events) == 1
    group.members["scheduler"].send_signal(signal.SIGTERM)
    assert group.end("scheduler")[0] == 0


def test_a_second_scheduler_of_the_run_is_refused(make_group: Any) -> None:
    group = make_group()
    group.start("scheduler")
    group.hear("scheduler", "listening")
    group.start("scheduler", key="second")
    status, stderr = group.end("second")
    assert status == 1
    assert "hub.sock: address in use" in stderr
    group.start("frontend")
    group.start("target-0")
    assert group.hear("scheduler", "ready")["facts"]["target-0"]["rank"] == 0


def test_waiting_for_the_group_has_a_deadline(make_group: Any) -> None:
    group = make_group(ready_timeout=2.0)
    group.start("scheduler")
    group.start("target-0", "never-ready")
    status, stderr = group.end("scheduler")
    assert status == 1
    assert "not ready within 2 s: frontend (not connected), target-0 (starting)" in stderr
    assert group.end("target-0")[0] == 0


def test_a_process_without_its_scheduler_gives_up(make_group: Any) -> None:
    group = make_group(ready_timeout=1.0)
    group.start("frontend")
    expected = (1, "error: scheduler: no answer to frontend within 1 s\n")
    assert group.end("frontend") == expected


def test_unusable_cores_are_named(make_group: Any) -> None:
    group = make_group()
    config = msgspec.structs.replace(group.config, target=TargetSection(cpus=[4000]))
    (group.folder / "config.json").write_bytes(msgspec.json.encode(config))
    group.start("target-0")
    status, stderr = group.end("target-0")
    assert status == 1
    assert stderr.startswith("error: target.cpus: ")


def test_a_process_ends_with_its_supervisor(make_group: Any) -> None:
    """The supervisor is a shell that waits for its child; killing it must end the child."""
    group = make_group()
    script = 'SSD_SUPERVISOR_PID=$$ "$@" & echo $!; wait'
    member = [sys.executable, "-m", "tests.procs.member", "frontend", "never-ready"]
    shell = subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *member, str(group.folder / "config.json"), "0"],
        stdout=subprocess.PIPE,
    )
    group.members["shell"] = shell
    assert shell.stdout is not None
    pidfd = os.pidfd_open(int(shell.stdout.readline()))
    wait_for(lambda: list_runs(group.shm_dir) == ["r"])
    shell.kill()
    wait_for(lambda: list_runs(group.shm_dir) == [], 15)
    os.close(pidfd)
    assert [r["reason"] for r in group.log("frontend") if r["event"] == "exit"] == ["SIGTERM"]


def test_a_process_of_a_dead_supervisor_does_not_start(make_group: Any) -> None:
    group = make_group()
    group.start("frontend", SSD_SUPERVISOR_PID="1")
    assert group.end("frontend") == (0, "")
    assert not (group.folder / "logs").exists()


def test_expected_names() -> None:
    assert expected_names(PipelineConfig(mode="ar")) == ["frontend", "target-0"]
    tp = PipelineConfig(mode="ssd", target=TargetSection(tp=2))
    assert expected_names(tp) == ["frontend", "target-0", "target-1", "draft"]


def test_stop_flag() -> None:
    flag = StopFlag()
    flag.check()
    assert not flag.wait(0)
    flag.set("first")
    flag.set("second")
    assert flag.wait(30)
    assert flag.reason == "first"
    with pytest.raises(Stopping, match="first"):
        flag.check()


def test_pulse_is_exempt_until_begun() -> None:
    pulse = Pulse(limit=0)
    assert pulse.beating()
    pulse.begin()
    assert not pulse.beating()
    pulse = Pulse(limit=60)
    pulse.begin()
    assert pulse.beating()
