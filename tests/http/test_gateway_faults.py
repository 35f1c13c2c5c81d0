"""What HTTP clients see when the pipeline is slow, refuses, stops, hangs or dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from ipc.messages.requests import AddRequest, Rejected, TokensOut
from procs.http import health
from tests.frontend_peer import HANG, Echo, Pipeline, pipeline
from tests.http.server import Server, gateway_before, whole_pipeline
from tests.waiting import wait_for

COMPLETIONS = "/v1/completions"


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Pipeline]:
    with pipeline(tmp_path) as made:
        yield made


@pytest.fixture
def echo(played: Pipeline) -> Iterator[Echo]:
    made = Echo(played.peer)
    yield made
    made.close()


def post(server: Server, **fields: object) -> contextlib.closing:
    body = json.dumps({"prompt": [HANG], **fields}).encode()
    return contextlib.closing(server.send("POST", COMPLETIONS, body))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_runs_out_of_time_gets_504_and_is_cancelled(
    played: Pipeline, echo: Echo, streamed: bool
) -> None:
    with gateway_before(played, request_timeout=0.3) as (_, server):
        reply = server.post(COMPLETIONS, prompt=[HANG], stream=streamed)
        assert (reply.status, reply.error["type"]) == (504, "timeout_error")
    assert echo.aborted.get(timeout=10).rid == echo.added.get(timeout=10).rid


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_before_the_first_token_cancels(
    played: Pipeline, echo: Echo, streamed: bool
) -> None:
    with gateway_before(played) as (_, server):
        with post(server, stream=streamed):
            rid = echo.added.get(timeout=10).rid
        assert echo.aborted.get(timeout=10).rid == rid


def test_a_stream_that_fails_ends_with_an_error_event(played: Pipeline) -> None:
    with gateway_before(played) as (_, server), post(server, stream=True) as connection:
        request = played.peer.recv()
        assert isinstance(request, AddRequest)
        played.peer.send(TokensOut(request.rid, [3 + ord("a") - 33], 0))
        played.peer.send(Rejected(request.rid, 503, "the target is gone"))
        events = connection.getresponse().read().split(b"\n\n")
        assert [e for e in events if b"DONE" in e] == []
        error = json.loads(events[-2].removeprefix(b"data: "))["error"]
        assert (error["message"], error["code"]) == ("the target is gone", 503)


def test_the_openai_package_raises_for_an_error_event(played: Pipeline) -> None:
    with (
        gateway_before(played) as (_, server),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api,
    ):
        import threading

        def answer() -> None:
            request = played.peer.recv()
            assert isinstance(request, AddRequest)
            played.peer.send(TokensOut(request.rid, [50], 0))
            played.peer.send(Rejected(request.rid, 503, "the target is gone"))

        thread = threading.Thread(target=answer)
        thread.start()
        stream = api.completions.create(model="model", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="the target is gone"):
            list(stream)
        thread.join()


def test_a_refusal_of_the_scheduler_keeps_its_status(played: Pipeline) -> None:
    with gateway_before(played) as (_, server), post(server, stream=True) as connection:
        request = played.peer.recv()
        assert isinstance(request, AddRequest)
        played.peer.send(Rejected(request.rid, 429, "the queue is full"))
        assert connection.getresponse().status == 429


def test_a_stopping_gateway_fails_what_is_open_and_says_so(played: Pipeline, echo: Echo) -> None:
    with gateway_before(played) as (stopping, server), post(server) as connection:
        echo.added.get(timeout=10)
        stopping.set("target-0: process 7 died")
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        assert (response.status, error["code"]) == (503, 503)
        assert error["message"] == "pipeline stopped: target-0: process 7 died"
        reply = server.ask("GET", "/health")
        assert (reply.status, reply.json["status"]) == (503, "unavailable")
        assert "target-0: process 7 died" in reply.json["reason"]
        assert server.post(COMPLETIONS, prompt="x").status == 503
        wait_for(lambda: refuses(server), 10)


def test_an_orderly_end_is_told_as_the_frontend_tells_it(played: Pipeline, echo: Echo) -> None:
    with gateway_before(played) as (stopping, server), post(server) as connection:
        echo.added.get(timeout=10)
        stopping.set("SIGTERM")
        error = json.loads(connection.getresponse().read())["error"]
        assert error["message"] == "the pipeline is stopping"


def refuses(server: Server) -> bool:
    try:
        server.ask("GET", "/health")
    except ConnectionError:
        return True
    return False


def test_a_pipeline_that_is_gone(played: Pipeline, echo: Echo) -> None:
    with gateway_before(played) as (_, server), post(server) as connection:
        echo.added.get(timeout=10)
        played.stop()
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (503, 503)
        assert server.ask("GET", "/health").status == 503
        assert b"\nssd_pipe:up{" in server.ask("GET", "/metrics").body


def test_a_scheduler_that_does_not_answer_is_unhealthy(
    played: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "DEADLINE", 1.5)
    with gateway_before(played) as (_, server):
        reply = server.ask("GET", "/health")
        assert (reply.status, reply.json["reason"]) == (503, "scheduler: no answer within 1.5 s")


def test_too_many_connections_get_503(played: Pipeline, echo: Echo) -> None:
    with gateway_before(played, max_connections=3) as (_, server), contextlib.ExitStack() as open_:
        for _ in range(2):
            open_.enter_context(post(server))
            echo.added.get(timeout=10)
        assert server.ask("GET", "/version").status == 503
    with gateway_before(played, max_connections=3) as (_, server):
        assert server.ask("GET", "/version").status == 200


def test_a_killed_worker_is_an_error_for_everybody_at_once(tmp_path: Path) -> None:
    with whole_pipeline(tmp_path, mode="ar") as (supervisor, server):
        body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "n": 16}
        with post(server, **body, stream=True) as connection:
            response = connection.getresponse()
            assert response.status == 200
            pids = supervisor.pids
            os.kill(pids["target-0"], signal.SIGKILL)
            killed = time.monotonic()
            rest = response.read()
            assert b'"error"' in rest
            assert b"[DONE]" not in rest
            unhealthy = server.ask("GET", "/health")
            assert unhealthy.status == 503
            assert unhealthy.json["reason"]
        assert supervisor.wait(10)
        assert time.monotonic() - killed < 10
        assert supervisor.failure.startswith("target-0: was killed by SIGKILL")
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()), 5)


def test_a_stopped_worker_is_unhealthy_before_the_group_gives_up(tmp_path: Path) -> None:
    with whole_pipeline(tmp_path, mode="ar", **{"run.beat_timeout": 6.0}) as (supervisor, server):
        assert server.ask("GET", "/health").status == 200
        os.kill(supervisor.pids["target-0"], signal.SIGSTOP)
        wait_for(lambda: server.ask("GET", "/health").status == 503)
        reason = server.ask("GET", "/health").json["reason"]
        assert reason.startswith("target-0: no heartbeat")
        os.kill(supervisor.pids["target-0"], signal.SIGCONT)
        wait_for(lambda: server.ask("GET", "/health").status == 200)
