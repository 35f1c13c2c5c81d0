"""Processes killed and stopped under load, and what becomes of requests, group and machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from ipc.messages.client import StatusReply
from ipc.rundir import list_runs
from ssd_pipe.client import Client, Result, Stream
from ssd_pipe.errors import PeerLost, RequestError, SsdPipeError
from ssd_pipe.params import SamplingParams
from ssd_pipe.supervisor import GroupState, Supervisor
from tests.http.server import Reply, Server, whole_pipeline
from tests.waiting import wait_for

START = 120.0  # seconds; several test runs may share two cores
TOKENS = 300
ANSWERS = 16  # of a stream over HTTP
PROMPTS = ["def f(x):", "0123456789" * 9, "naïve café", "x = ["]
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, seed=7)


class Run:
    """A pipeline under a supervisor that restarts, and its clients."""

    def __init__(self, supervisor: Supervisor, server: Server) -> None:
        self.supervisor = supervisor
        self.server = server
        self.client = Client(supervisor.endpoint, timeout=20.0)

    def signal(self, name: str, number: int) -> int:
        pid = self.supervisor.pids[name]
        os.kill(pid, number)
        return pid

    def status(self) -> StatusReply:
        return self.client.status()

    def served_by_draft(self) -> float:
        """Chains that came from the draft so far, from its cache or just in time."""
        counters = self.status().counters
        return counters["hits"] + counters["backup_jit"]

    def health(self) -> Reply:
        return self.server.ask("GET", "/health")

    def whole(self) -> None:
        """Wait until every process is there and the draft is used."""

        def is_whole() -> bool:
            try:
                reply = self.status()
            except SsdPipeError:
                return False
            ready = {p.name for p in reply.processes if p.state == "ready"}
            return not reply.degraded and ready == set(self.supervisor.pids) == self.names(reply)

        wait_for(is_whole, START)

    @staticmethod
    def names(reply: StatusReply) -> set[str]:
        return {p.name for p in reply.processes}

    def all(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Tokens of every prompt, answered together."""

        def one(prompt: str) -> Result:
            return self.client.generate(prompt, params)

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return [result.token_ids for result in pool.map(one, PROMPTS)]

    def files(self) -> set[str]:
        run = self.supervisor.config.run
        folder = Path(run.shm_dir) / f"ssd-pipe-{os.getuid()}" / run.name
        return {path.name for path in folder.iterdir() if not path.name.startswith(".config")}


@contextlib.contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Run]:
    values = {"run.on_failure": "restart", "run.beat_timeout": 4.0, "run.max_restarts": 20}
    values["speculation.adaptive"] = False  # the draft is to be in use when it fails
    with whole_pipeline(folder, **values | settings) as (supervisor, server):
        run = Run(supervisor, server)
        with run.client:
            yield run
        shm_dir = supervisor.config.run.shm_dir
        supervisor.stop()
        assert not list_runs(shm_dir)
        assert not list(Path(shm_dir).glob("ssd-pipe-*/*"))


@pytest.fixture(scope="module")
def ssd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with running(tmp_path_factory.mktemp("run"), mode="ssd") as run:
        yield run


@pytest.fixture
def run(ssd: Run) -> Run:
    ssd.whole()
    return ssd


# ---------------------------------------------------------------- the draft


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_draft_the_target_goes_on_and_no_token_differs(run: Run, number: int) -> None:
    expected = run.all(GREEDY) + run.all(SAMPLED)
    before = run.supervisor.pids
    asked = [(prompt, params) for params in (GREEDY, SAMPLED) for prompt in PROMPTS]
    streams = [run.client.stream(*each) for each in asked]
    firsts = [next(stream).token_ids for stream in streams]
    run.signal("draft", number)
    rests = [stream.result().token_ids for stream in streams]
    assert [f + r for f, r in zip(firsts, rests, strict=True)] == expected

    wait_for(lambda: run.status().degraded != "")
    assert run.status().degraded.startswith("draft: ")
    health = run.health()
    assert (health.status, health.json["status"]) == (200, "degraded")
    assert health.json["reason"].startswith("draft: ")
    assert run.all(GREEDY) + run.all(SAMPLED) == expected

    run.whole()
    health = run.health()
    assert (health.status, health.json["status"], health.json["reason"]) == (200, "ok", "")
    after = run.supervisor.pids
    assert after.pop("draft") != before.pop("draft")
    assert after == before
    served = run.served_by_draft()
    assert run.all(GREEDY) + run.all(SAMPLED) == expected
    assert run.served_by_draft() > served
    counters = run.status().counters
    assert counters["degraded"] == 0
    assert counters["free_blocks"] == counters["total_blocks"]


def test_a_draft_that_hangs_for_a_moment_is_used_again(run: Run) -> None:
    expected = run.all(GREEDY)
    losses = run.status().counters["draft_losses"]
    pid = run.signal("draft", signal.SIGSTOP)
    tokens: list[int] = []
    with run.client.stream(PROMPTS[0], GREEDY) as stream:
        for pieces, chunk in enumerate(stream):
            tokens += chunk.token_ids
            if pieces == 2:  # beyond the prompt's own: the target goes on without the draft
                os.kill(pid, signal.SIGCONT)
    assert tuple(tokens) == tuple(expected[0])
    run.whole()
    assert run.status().counters["draft_losses"] == losses + 1
    assert run.supervisor.pids["draft"] == pid
    served = run.served_by_draft()
    assert run.all(GREEDY) == expected
    assert run.served_by_draft() > served


def test_requests_can_be_cancelled_and_run_out_of_time_while_the_draft_hangs(run: Run) -> None:
    pid = run.signal("draft", signal.SIGSTOP)
    stream = run.client.stream(PROMPTS[0], GREEDY)
    late = run.client.stream(PROMPTS[1], GREEDY, timeout=0.2)
    with pytest.raises(RequestError, match="out of time") as caught:
        late.result()
    assert caught.value.code == 504
    stream.cancel()
    assert stream.result().finish_reason in ("cancelled", "length")
    os.kill(pid, signal.SIGCONT)
    run.whole()
    counters = run.status().counters
    assert counters["free_blocks"] == counters["total_blocks"]
    assert counters["running"] == counters["waiting"] == 0


# ---------------------------------------------------------------- the others


def test_a_killed_gateway_comes_back_on_its_port_and_nobody_else_notices(run: Run) -> None:
    before = run.supervisor.pids
    expected = run.all(GREEDY)
    answers = open_stream(run)
    stream = run.client.stream(PROMPTS[0], GREEDY)
    first = next(stream).token_ids
    run.signal("gateway", signal.SIGKILL)
    assert first + stream.result().token_ids == expected[0]
    assert_cut(answers)
    # The port takes connections all the while; they are answered when there is a gateway again.
    reply = run.server.post("/v1/completions", prompt="x", max_tokens=4, ignore_eos=True)
    assert reply.status == 200
    run.whole()
    after = run.supervisor.pids
    assert after.pop("gateway") != before.pop("gateway")
    assert after == before


def open_stream(run: Run) -> http.client.HTTPResponse:
    """Long answers, streamed over HTTP, which have begun."""
    return begun(ask_for_stream(run))


def ask_for_stream(run: Run) -> http.client.HTTPConnection:
    body = {"prompt": "x", "max_tokens": TOKENS, "ignore_eos": True, "n": ANSWERS, "stream": True}
    return run.server.send("POST", "/v1/completions", json.dumps(body).encode())


def begun(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    response = connection.getresponse()
    assert response.status == 200
    return response


def assert_cut(response: http.client.HTTPResponse) -> None:
    """The stream ends soon, and not as if it were complete."""
    with contextlib.suppress(ConnectionError, http.client.IncompleteRead):
        assert b"[DONE]" not in response.read()
    response.close()


def answering(run: Run) -> tuple[http.client.HTTPResponse, list[Stream]]:
    """``open_stream`` and as many streams, all in mid-answer at a target that is stopped.

    A target this small is done with them in less than a second, long before a question about them
    gets its turn behind their tokens: it goes on only until the first tokens have come.
    """
    target = run.signal("target-0", signal.SIGSTOP)
    connection = ask_for_stream(run)
    streams = [run.client.stream(prompt, GREEDY) for prompt in PROMPTS * (ANSWERS // len(PROMPTS))]
    wait_for(lambda: run.status().counters["frontend_open_requests"] == 1 + len(streams))
    os.kill(target, signal.SIGCONT)
    response = begun(connection)
    run.signal("target-0", signal.SIGSTOP)

    def unfinished() -> int:
        reply = run.status()
        return reply.running + reply.waiting

    wait_for(lambda: unfinished() == 2 * ANSWERS, otherwise=unfinished)
    return response, streams


def fail(run: Run, victim: str, number: int) -> None:
    """A process fails in mid-stream; everybody hears of it, and all of it comes back."""
    run.whole()
    expected, files = run.all(GREEDY), run.files()
    pids, restarts = run.supervisor.pids, run.supervisor.restarts
    answers, streams = answering(run)
    run.signal(victim, number)
    if victim != "target-0":
        run.signal("target-0", signal.SIGCONT)
    for stream in streams:
        with pytest.raises((RequestError, PeerLost)) as caught:
            stream.result()
        if isinstance(caught.value, RequestError):
            assert caught.value.code == 503
            assert "pipeline stopped: " in str(caught.value)
        else:
            assert "has gone" in str(caught.value)
    assert_cut(answers)
    wait_for(lambda: run.supervisor.restarts == restarts + 1, START)
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()), 10)
    wait_for(lambda: run.supervisor.state is GroupState.READY, START)
    assert run.supervisor.failure == ""
    assert set(run.supervisor.pids) == set(pids)
    assert run.all(GREEDY) == expected  # the same client, at the same address
    assert run.health().status == 200
    assert run.files() == files
    counters = run.status().counters
    assert counters["free_blocks"] == counters["total_blocks"]


def test_a_killed_target_fails_its_requests_and_the_group_comes_back(run: Run) -> None:
    fail(run, "target-0", signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_any_process_can_fail_in_any_mode(tmp_path: Path, mode: str, number: int) -> None:
    with running(tmp_path, mode=mode) as run:
        for victim in ("scheduler", "target-0", "frontend"):
            fail(run, victim, number)


@pytest.mark.slow
def test_the_rejection_rule_waits_for_a_dead_draft_once(tmp_path: Path) -> None:
    settings = {"mode": "ssd", "speculation.rule": "rejection"}
    with running(tmp_path, **settings) as run:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=1)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            run.whole()
            greedy = run.all(GREEDY)
            streams = [run.client.stream(prompt, params) for prompt in PROMPTS]
            next(streams[0])
            run.signal("draft", number)
            for stream in streams:
                stream.result()
            wait_for(lambda: run.status().degraded != "")
            assert run.all(GREEDY) == greedy
            run.whole()
            accepted = run.status().counters["accepted"]
            run.all(params)
            assert run.status().counters["accepted"] > accepted


@pytest.mark.slow
def test_a_group_that_does_not_stay_is_given_up(tmp_path: Path) -> None:
    with running(tmp_path, mode="ar", **{"run.max_restarts": 1}) as run:
        supervisor = run.supervisor
        run.signal("target-0", signal.SIGKILL)
        wait_for(lambda: supervisor.restarts == 1, START)
        wait_for(lambda: supervisor.state is GroupState.READY, START)
        run.signal("target-0", signal.SIGKILL)
        assert supervisor.wait(20)
        assert supervisor.exit_status == 1
        assert supervisor.failure == (
            "target-0: was killed by SIGKILL (given up, restarts in a row: 1)"
        )
        with pytest.raises(ConnectionError):
            run.health()
