"""``ssd-pipe top`` on a pipeline that works, idles, starts anew, and goes away."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from ipc.messages.client import StatusReply
from ssd_pipe.live.figures import Look, between, kv_usage, since_start
from tests.cli.conftest import Running
from tests.cli.terminal import plain, terminal
from tests.frontend_peer import Echo, pipeline
from tests.pipelines import command

TIMEOUT = 60


@contextmanager
def busy(running: Running) -> Iterator[None]:
    """Requests without a pause."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            running.work(20)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def numbers(view: str, name: str) -> list[str]:
    """The columns of a row: now, since the start."""
    (row,) = re.findall(rf"^{name}\s{{2,}}(\S+)\s+(\S+)$", view, re.MULTILINE)
    return list(row)


def test_one_view_of_a_busy_pipeline(running: Running) -> None:
    with busy(running):
        done = subprocess.run(
            command("top", *running.place, "--once", "--interval", "0.5"),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    view = done.stdout
    assert "\x1b" not in view
    assert f"run {running.supervisor.config.run.name}  mode ssd" in view
    rate, _ = numbers(view, "output tok/s")
    assert float(rate) > 0
    for name in ("tokens a round", "accepted length", "cache hit rate", "forward pass"):
        now, whole = numbers(view, name)
        assert float(now) > 0, name
        assert float(whole) > 0, name
    assert 0 < float(numbers(view, "cache hit rate")[1]) < 1
    assert re.search(r"KV .* \d+% of \d+ blocks", view)
    for process in ("scheduler", "target-0", "draft", "frontend", "gateway"):
        assert re.search(rf"^{process}\s+\d+\s+\d+\.\d\s+ready", view, re.MULTILINE), process


def test_views_on_a_terminal_until_ctrl_c(running: Running) -> None:
    with terminal("top", *running.place, "-d", "0.1") as screen:
        screen.until("last ")
        screen.until("last ")
        assert "gateway" in plain(screen.seen)
        screen.interrupt()
        assert screen.end() == 0


def test_the_end_of_the_pipeline_is_one_line_and_a_status(tmp_path: Path) -> None:
    with pipeline(tmp_path) as run:
        echo = Echo(run.peer)
        try:
            process = subprocess.Popen(
                command("top", "--endpoint", run.endpoint, "--interval", "0.1"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("scheduler"):
                    break
            run.stop()
        finally:
            echo.close()
        try:
            _, error = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    assert process.returncode == 1
    (line,) = error.splitlines()
    assert line.startswith("error: ")
    assert run.endpoint in line


def reply(run: str = "a", age: float = 0.0, **counters: float) -> StatusReply:
    return StatusReply(
        id="", run=run, mode="ssd", target="t", draft="d", max_model_len=9, running=1, waiting=0,
        counters=counters, age=age,
    )  # fmt: skip


def test_rates_are_of_the_time_between_the_counters() -> None:
    before = Look.at(
        reply(age=0.5, steps=10, output_tokens=100, rounds=10, accepted=20, hits=5, misses=5,
              verify_seconds=1.0, forward_seconds=0.9, overhead_seconds=0.1), 100.0
    )  # fmt: skip
    after = Look.at(
        reply(age=0.0, steps=20, output_tokens=160, rounds=30, accepted=80, hits=20, misses=10,
              verify_seconds=1.4, forward_seconds=1.2, overhead_seconds=0.15,
              frontend_prompt_tokens=30, free_blocks=30, total_blocks=40), 101.5
    )  # fmt: skip
    span = between(before, after)
    assert span.seconds == 2.0
    assert span.output_rate == 30.0
    assert span.prompt_rate == 15.0
    assert span.accepted == 3.0
    assert span.tokens_a_round == 4.0
    assert span.hit_rate == 0.75
    assert span.prefix_rate is None
    assert span.step_ms["forward pass"] == pytest.approx(30.0)
    assert span.step_ms["judging"] == pytest.approx(10.0)
    assert span.step_ms["overhead"] == pytest.approx(5.0)
    assert kv_usage(after.reply) == 0.25
    assert since_start(after).output_rate is None
    assert since_start(after).accepted == pytest.approx(80 / 30)


def test_nothing_is_said_of_a_span_across_a_new_start() -> None:
    old, new = Look.at(reply(steps=10), 1.0), Look.at(reply(steps=3), 2.0)
    assert between(old, new).output_rate is None
    other = Look.at(msgspec.structs.replace(reply(steps=12), run="b"), 2.0)
    assert between(old, other).steps == 0


def test_a_wrong_interval_is_named(running: Running) -> None:
    done = subprocess.run(
        command("top", *running.place, "--interval", "0"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 2
    assert "--interval" in done.stderr


def test_a_terminated_top_leaves_the_terminal_as_it_was(running: Running) -> None:
    with terminal("top", *running.place, "-d", "0.1") as screen:
        screen.until("last ")
        screen.process.send_signal(signal.SIGTERM)
        screen.end()
        assert screen.seen.count("\x1b[?1049h") == screen.seen.count("\x1b[?1049l") == 1
