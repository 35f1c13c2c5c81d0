"""The supervisor: its process group with real processes, its start-up checks, whole pipelines."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd_pipe.children import LineBuffer
from ssd_pipe.group import ProcessGroup
from ssd_pipe.last_words import LastWords
from ssd_pipe.members import SUPERVISOR_VARIABLE
from ssd_pipe.relay import Relay

HELLO = "print('hello', flush=True)\n"
IDLE = HELLO + "import signal\nwhile True: signal.pause()\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + IDLE


class Lines:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lines: list[tuple[str, str, str]] = []

    def event(self, level: str, event: str, **facts: Any) -> None:
        self.events.append((event, facts))

    def line(self, process: str, stream: str, line: str) -> None:
        self.lines.append((process, stream, line))

    def open_file(self, path: Path, limit: int = 0) -> None: ...

    def close(self) -> None: ...

    def greeted(self) -> set[str]:
        return {process for process, _, line in self.lines if line == "hello"}


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def group(lines: Lines) -> Iterator[ProcessGroup]:
    made = ProcessGroup(lines)
    yield made
    made.tear_down([], 0.1, lambda: True)
    made.close()


def start(group: ProcessGroup, name: str, code: str) -> None:
    group.start(name, [sys.executable, "-S", "-c", code], os.environ)


def said(reason: str, peer: str = "") -> str:
    """The line with these last words to a supervisor."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(out):
        patch.setenv(SUPERVISOR_VARIABLE, "1")
        LastWords(reason, peer).say()
    return out.getvalue()


def ending(reason: str, peer: str = "") -> str:
    """Code of a process that ends with these words to its supervisor."""
    return f"import sys\nsys.stderr.write({said(reason, peer)!r})\nexit(1)"


def turn_until(group: ProcessGroup, condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        group.turn(0.05)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_line_buffer_gives_whole_lines_however_the_bytes_are_cut() -> None:
    text = "first\nsecond é\r\n\nlast without end"
    for size in (1, 2, 3, 7, 100):
        buffer, got = LineBuffer(), []
        data = text.encode()
        for i in range(0, len(data), size):
            got += buffer.feed(data[i : i + size])
        got += buffer.feed(b"")
        assert got == ["first", "second é", "", "last without end"]


def test_output_of_both_streams_is_passed_on_by_name(group: ProcessGroup, lines: Lines) -> None:
    start(group, "draft", "import sys\nprint('to out')\nprint('to err', file=sys.stderr)\n")
    turn_until(group, lambda: len(lines.lines) == 2)
    assert sorted(lines.lines) == [("draft", "stderr", "to err"), ("draft", "stdout", "to out")]


def test_a_killed_process_is_blamed_before_those_that_left_because_of_it(
    group: ProcessGroup, lines: Lines
) -> None:
    start(group, "target-0", IDLE)
    start(group, "draft", ending("target-0: gone", "target-0"))
    turn_until(group, lambda: group.broken and "target-0" in lines.greeted())
    os.kill(group.pids["target-0"], signal.SIGKILL)
    assert group.blame() == ("target-0", "target-0: was killed by SIGKILL")


def test_a_process_that_failed_is_blamed_before_its_peers(
    group: ProcessGroup, lines: Lines
) -> None:
    start(group, "scheduler", ending("target-0: gone", "target-0"))
    turn_until(group, lambda: group.broken)
    start(group, "target-0", ending("no weight"))
    assert group.blame() == ("target-0", "target-0: no weight")


def test_a_peer_that_did_not_exit_is_named_by_the_one_that_missed_it(group: ProcessGroup) -> None:
    start(group, "target-0", IDLE)
    start(group, "scheduler", ending("no heartbeat of target-0 for 10 s", "target-0"))
    turn_until(group, lambda: group.broken)
    assert group.blame() == ("target-0", "no heartbeat of target-0 for 10 s")


@pytest.mark.parametrize("plain", [False, True])
def test_nobody_is_blamed_for_the_words_of_an_error(group: ProcessGroup, plain: bool) -> None:
    start(group, "target-0", IDLE)
    words = "target-0: no such setting"
    code = f"import sys\nprint('error: {words}', file=sys.stderr)\nexit(1)"
    start(group, "scheduler", code if plain else ending(words))
    turn_until(group, lambda: group.broken)
    assert group.blame() == ("scheduler", f"scheduler: {words}")


def test_the_last_line_explains_an_exit_without_an_error_line(group: ProcessGroup) -> None:
    start(group, "draft", "raise ValueError('from deep inside')")
    turn_until(group, lambda: group.broken)
    reason = "draft: exited with status 1: ValueError: from deep inside"
    assert group.blame() == ("draft", reason)


def test_ends_stage_by_stage(group: ProcessGroup, lines: Lines) -> None:
    saying = (
        "import signal, time\n"
        "def leave(*_):\n"
        "    print('term', time.monotonic_ns(), flush=True)\n"
        "    raise SystemExit\n"
        "signal.signal(signal.SIGTERM, leave)\n" + IDLE
    )
    names = ("target-0", "target-1", "frontend", "scheduler")
    for name in names:
        start(group, name, saying)
    turn_until(group, lambda: lines.greeted() == set(names))
    group.tear_down([("frontend",), ("scheduler",), ("target",)], 9.0, lambda: False)
    times = {p: int(line.split()[1]) for p, _, line in lines.lines if line.startswith("term")}
    assert times["frontend"] < times["scheduler"] < min(times["target-0"], times["target-1"])
    assert not any(event == "killing" for event, _ in lines.events)


def test_a_process_that_ignores_term_is_killed_after_the_grace_time(
    group: ProcessGroup, lines: Lines
) -> None:
    start(group, "draft", STUBBORN)
    turn_until(group, lambda: lines.greeted() == {"draft"})
    pid, begun = group.pids["draft"], time.monotonic()
    group.tear_down([("draft",)], 0.4, lambda: False)
    assert 0.4 <= time.monotonic() - begun < 4
    assert ("killing", {"name": "draft", "pid": pid}) in lines.events
    assert gone(pid)


def test_hurry_skips_the_grace_time(group: ProcessGroup, lines: Lines) -> None:
    start(group, "draft", STUBBORN)
    turn_until(group, lambda: lines.greeted() == {"draft"})
    begun = time.monotonic()
    group.tear_down([("draft",)], 60.0, lambda: True)
    assert time.monotonic() - begun < 10


def test_ctrl_c_at_the_terminal_does_not_reach_the_children(
    group: ProcessGroup, lines: Lines
) -> None:
    start(group, "draft", "import os\nprint(os.getpgrp() == os.getpid())\n" + IDLE)
    turn_until(group, lambda: lines.greeted() == {"draft"})
    assert ("draft", "stdout", "True") in lines.lines


def test_relay_names_the_process_and_keeps_plain_lines_in_its_file(tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "logs" / "supervisor.jsonl"
    with out.open("w") as stream:
        relay = Relay("info", stream)
        relay.open_file(kept)
        relay.line("draft", "stderr", '{"event": "slow", "level": "warning", "proc": "?"}')
        relay.line("draft", "stderr", '{"event": "detail", "level": "debug"}')
        relay.line("target-0", "stderr", "Segmentation fault")
        relay.event("error", "failed", reason="x")
        relay.close()
    shown = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(f["proc"], f["event"]) for f in shown] == [
        ("draft", "slow"),
        ("target-0", "Segmentation fault"),
        ("supervisor", "failed"),
    ]
    own = [json.loads(line)["event"] for line in kept.read_text().splitlines()]
    assert own == ["Segmentation fault", "failed"]


def test_relay_keeps_last_words_and_shows_no_empty_peer(tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "supervisor.jsonl"
    with out.open("w") as stream:
        relay = Relay("info", stream)
        relay.open_file(kept)
        relay.line("draft", "stderr", said("no room").strip())
        relay.line("frontend", "stderr", said("scheduler: gone", "scheduler").strip())
        relay.close()
    for file in (out, kept):
        own, missed = (json.loads(line) for line in file.read_text().splitlines())
        assert (own["proc"], own["level"], own["event"]) == ("draft", "error", "no room")
        assert "lost_peer" not in own
        assert (missed["event"], missed["lost_peer"]) == ("scheduler: gone", "scheduler")
