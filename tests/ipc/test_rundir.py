from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ipc import janitor
from ipc.rundir import OWNED, RunDir, find_run, list_runs
from ssd_pipe.errors import ConfigError, ResourceError
from tests.ipc.conftest import Start
from tests.waiting import wait_for


def read_line(child: subprocess.Popen[str]) -> list[str]:
    assert child.stdout is not None
    return child.stdout.readline().split()


def base(shm_dir: Path) -> Path:
    return shm_dir / f"ssd-pipe-{os.getuid()}"


def janitors_of(path: Path) -> int:
    """Processes whose command line names the run directory: one shell for each janitor."""
    found = 0
    for process in psutil.process_iter(["cmdline"]):
        found += str(path) in (process.info["cmdline"] or [])
    return found


def test_owner_only_and_gone_after_close(shm_dir: Path) -> None:
    with RunDir.create(shm_dir, "one") as run:
        assert run.path == base(shm_dir) / "one"
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
        assert os.listdir(run.path) == [".lock"]
        assert list_runs(shm_dir) == ["one"]
        assert find_run(shm_dir) == run.path
    assert os.listdir(base(shm_dir)) == []
    run.close()


def test_fresh_names_differ(shm_dir: Path) -> None:
    with RunDir.create(shm_dir) as a, RunDir.create(shm_dir) as b:
        assert a.name != b.name
        assert list_runs(shm_dir) == sorted([a.name, b.name])
        with pytest.raises(ResourceError, match="several runs"):
            RunDir.open(shm_dir)


def test_a_run_that_a_program_has_for_itself_is_not_in_the_way(shm_dir: Path) -> None:
    with RunDir.create(shm_dir, f"{OWNED}7-01234567") as own:
        assert find_run(shm_dir) == own.path
        with pytest.raises(ResourceError, match=f"have for themselves: {own.name}"):
            find_run(shm_dir, owned=False)
        with RunDir.create(shm_dir, "r") as run:
            assert find_run(shm_dir) == run.path


def test_last_one_out_removes(shm_dir: Path) -> None:
    first = RunDir.create(shm_dir, "r")
    second = RunDir.open(shm_dir, "r")
    third = RunDir.create_or_open(shm_dir, "r")
    assert (first.created, second.created, third.created) == (True, False, False)
    first.close()
    third.close()
    assert second.path.is_dir()
    second.close()
    assert not second.path.exists()


def test_name_in_use_is_refused(shm_dir: Path) -> None:
    with RunDir.create(shm_dir, "r"):
        with pytest.raises(ResourceError, match="a run named 'r' is already up"):
            RunDir.create(shm_dir, "r")
        assert list_runs(shm_dir) == ["r"]
        assert [p for p in os.listdir(base(shm_dir)) if p != "r"] == []


def test_too_little_memory_names_both_figures(shm_dir: Path) -> None:
    info = os.statvfs(shm_dir)
    with pytest.raises(ResourceError, match=r"dev/shm.*MiB needed, \d+ MiB available"):
        RunDir.create(shm_dir, "r", info.f_bavail * info.f_frsize + (64 << 20))
    assert os.listdir(base(shm_dir)) == []


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b"])
def test_bad_names(shm_dir: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        RunDir.create(shm_dir, name)


def test_long_paths_are_refused(shm_dir: Path) -> None:
    with pytest.raises(ResourceError, match="too long for unix sockets"):
        RunDir.create(shm_dir, "n" * 100)
    with RunDir.create(shm_dir, "r") as run, pytest.raises(ResourceError, match="107 bytes"):
        run.socket("s" * 100)


def test_missing_folder_and_missing_run(shm_dir: Path) -> None:
    with pytest.raises(ResourceError, match="No such file"):
        RunDir.create(shm_dir / "nowhere")
    with pytest.raises(ResourceError, match="no run 'r'"):
        RunDir.open(shm_dir, "r")
    with pytest.raises(ResourceError, match="no run"):
        RunDir.open(shm_dir)


def test_a_folder_others_can_enter_is_refused(shm_dir: Path) -> None:
    base(shm_dir).mkdir(mode=0o755)
    with pytest.raises(ResourceError, match="0700"):
        RunDir.create(shm_dir)


def test_sweep_removes_only_what_nobody_holds(shm_dir: Path) -> None:
    with RunDir.create(shm_dir, "live"):
        dead = base(shm_dir) / "dead"
        dead.mkdir()
        (dead / ".lock").touch()
        (dead / "x.shm").write_bytes(b"x")
        (base(shm_dir) / "lockless").mkdir()
        (base(shm_dir) / ".gone-0123").mkdir()
        assert list_runs(shm_dir) == ["live"]
        assert RunDir.sweep(shm_dir) == ["dead", "lockless"]
        assert os.listdir(base(shm_dir)) == ["live"]


def test_a_dead_run_of_the_same_name_gives_way(shm_dir: Path) -> None:
    dead = base(shm_dir) / "r"
    dead.mkdir(parents=True)
    base(shm_dir).chmod(0o700)
    (dead / ".lock").touch()
    (dead / "old.shm").touch()
    with pytest.raises(ResourceError, match="no run 'r'"):
        RunDir.open(shm_dir, "r")
    with RunDir.create_or_open(shm_dir, "r") as run:
        assert run.created
        assert os.listdir(run.path) == [".lock"]


def test_a_forked_child_leaves_the_hold_alone(shm_dir: Path) -> None:
    with RunDir.create(shm_dir, "r") as run:
        if (pid := os.fork()) == 0:
            run.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert list_runs(shm_dir) == ["r"]


def test_kill_9_of_all_holders_at_once(shm_dir: Path, start: Start) -> None:
    first = start("hold", shm_dir, "create", "r")
    assert read_line(first) == ["r", "1", "r"]
    others = [start("hold", shm_dir, "open", "r") for _ in range(2)]
    assert [read_line(c)[:2] for c in others] == [["r", "0"]] * 2
    path = base(shm_dir) / "r"
    assert sorted(os.listdir(path)) == [".lock", "self.bell", "self.shm"]
    first.kill()
    first.wait()
    assert list_runs(shm_dir) == ["r"]
    for child in others:
        child.send_signal(signal.SIGKILL)
    wait_for(lambda: os.listdir(base(shm_dir)) == [])
    wait_for(lambda: janitors_of(path) == 0)


def test_janitor_without_flock(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python janitor, with this process as the only holder, which lets go without closing."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    run = RunDir.create(shm_dir, "r")
    assert janitors_of(run.path) == 1
    os.close(run._lock_fd)
    run._lock_fd = -1
    wait_for(lambda: not run.path.exists())
    wait_for(lambda: janitors_of(run.path) == 0)


@pytest.mark.parametrize("flock", [True, False])
def test_janitor_ends_a_removal_whose_process_was_killed(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, flock: bool
) -> None:
    if not flock:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    run = RunDir.create(shm_dir, "r")
    (run.path / "a.shm").touch()
    run.path.rename(run.path.parent / ".gone-half")  # as the last one out does, and no more
    os.close(run._lock_fd)
    run._lock_fd = -1
    wait_for(lambda: os.listdir(base(shm_dir)) == [])


def test_janitor_spares_a_later_run_of_the_same_name(shm_dir: Path) -> None:
    for _ in range(10):
        RunDir.create(shm_dir, "r").close()
    with RunDir.create(shm_dir, "r") as run:
        (run.path / "keep").touch()
        wait_for(lambda: janitors_of(run.path) == 1)
        assert (run.path / "keep").exists()
        assert list_runs(shm_dir) == ["r"]


def test_janitor_leaves_no_child_behind(shm_dir: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with RunDir.create(shm_dir, "r"):
        assert set(psutil.Process().children(recursive=True)) == before


def test_janitor_script_runs_isolated() -> None:
    """Started by file name, next to modules whose names could shadow the standard library's."""
    command = [sys.executable, "-I", "-S", str(janitor.__file__), "/nonexistent", "/nonexistent-2"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert done.stderr == b""


def test_one_of_many_creators_wins(shm_dir: Path, start: Start) -> None:
    children = [start("compete", shm_dir, "r") for _ in range(6)]
    answers = [read_line(c)[0] for c in children]
    assert sorted(answers) == ["created", *["in-use"] * 5]
    children[answers.index("created")].communicate("leave\n")
    assert os.listdir(base(shm_dir)) == []


def test_any_process_may_come_first(shm_dir: Path, start: Start) -> None:
    children = [start("hold", shm_dir, "create_or_open", "r") for _ in range(5)]
    created = [read_line(c)[1] for c in children]
    assert sorted(created) == ["0", "0", "0", "0", "1"]
    for child in children:
        child.communicate("leave\n")
    assert not (base(shm_dir) / "r").exists()


def test_four_runs_side_by_side(shm_dir: Path, start: Start) -> None:
    children = [start("hold", shm_dir, "create") for _ in range(4)]
    names = []
    for child in children:
        name, created, through_channel = read_line(child)
        assert created == "1"
        assert through_channel == name
        names.append(name)
    assert list_runs(shm_dir) == sorted(names)
    assert len(set(names)) == 4
    children[0].kill()
    children[1].communicate("leave\n")
    wait_for(lambda: list_runs(shm_dir) == sorted(names[2:]))
    for child in children[2:]:
        child.communicate("leave\n")
    wait_for(lambda: os.listdir(base(shm_dir)) == [])
