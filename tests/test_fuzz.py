"""Strangers at the doors of a running pipeline: whatever they send is answered or dropped, counted,
and harms nobody. All the while somebody else is served, and gets exactly the right text."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipc.messages.client import Ask, Cancel, Chunk, Failure, Submit
from ipc.sockets import ipc_path
from ssd_pipe.client import Client
from ssd_pipe.errors import RequestError
from ssd_pipe.params import SamplingParams
from tests import wire
from tests.http.server import Server, whole_pipeline
from tests.waiting import wait_for
from tests.wire import Stranger, encode, ends

MAX_BODY = 64 * 1024
MAX_ECHO = 4096  # bytes of an answer to what was no message
fuzzed = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Witness:
    """Asks the same again and again while others misbehave.

    Attributes:
        answers: how many were right.
        wrong: those that were not, and errors.
    """

    def __init__(self, endpoint: str) -> None:
        self.answers = 0
        self.wrong: list[Any] = []
        self._client = Client(endpoint)
        self._expected = [self._ask(number) for number in range(4)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _ask(self, number: int) -> tuple[str, tuple[int, ...]]:
        sampled = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.5 * number, seed=3)
        result = self._client.generate(f"witness {number}", sampled)
        return result.text, result.token_ids

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            number = (number + 1) % len(self._expected)
            try:
                found = self._ask(number)
            except Exception as error:
                self.wrong.append(error)
                return
            if found != self._expected[number]:
                self.wrong.append(found)
            self.answers += 1
            self._stop.wait(0.02)

    def served_since(self, before: int) -> bool:
        """Whether there were right answers since, and no wrong one ever; waits for one."""
        wait_for(lambda: self.answers > before or bool(self.wrong))
        return not self.wrong

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


class Run:
    def __init__(self, endpoint: str, server: Server, pids: dict[str, int], folder: Path) -> None:
        self.endpoint = endpoint
        self.server = server
        self.pids = pids
        self.folder = folder
        self.witness = Witness(endpoint)

    def counters(self) -> dict[str, float]:
        with Stranger(self.endpoint) as stranger:
            return stranger.status()[0].counters


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("fuzz")
    limits = {"gateway.max_body_bytes": MAX_BODY, "speculation.backup": "jit"}
    with whole_pipeline(folder, **limits) as (supervisor, server):
        started = dict(supervisor.pids)
        [path] = [ipc_path(supervisor.endpoint)]
        assert path is not None
        made = Run(supervisor.endpoint, server, started, path.parent)
        yield made
        made.witness.close()
        assert made.witness.answers > 20
        assert made.witness.wrong == []
        assert supervisor.pids == started
        assert supervisor.failure == ""


@pytest.fixture(autouse=True)
def unharmed(run: Run) -> Iterator[None]:
    """After every test the witness is still served and every block is free."""
    before = run.witness.answers
    yield
    assert run.witness.served_since(before)
    wait_for(lambda: run.counters()["frontend_open_requests"] <= 1)  # the witness's own
    assert all(psutil.pid_exists(pid) for pid in run.pids.values())


def check(run: Run, frames: list[bytes]) -> None:
    """Send it: what is no message is answered once, shortly, and counted; the line stays open."""
    good = wire.is_message(frames)
    with Stranger(run.endpoint) as stranger:
        before = stranger.status()[0].counters["frontend_bad_messages"]
        stranger.send(*frames)
        if not good:
            failure = stranger.recv()
            assert isinstance(failure, Failure)
            assert failure.code in (400, 413)
            assert len(encode(failure)) < MAX_ECHO
        after, others = stranger.status()
        assert after.counters["frontend_bad_messages"] == before + (not good)
        for message in others:
            assert not isinstance(message, Failure) or message.code in (400, 413, 429), message
            assert len(encode(message)) < MAX_ECHO


@fuzzed
@given(data=st.binary(max_size=80) | wire.flipped() | wire.mistyped())
def test_what_is_no_message_is_answered_and_counted(run: Run, data: bytes) -> None:
    check(run, [data])


@pytest.mark.parametrize("number", range(len(wire.ODD_FRAMES)))
def test_odd_frames(run: Run, number: int) -> None:
    check(run, wire.ODD_FRAMES[number])


@pytest.mark.parametrize("levels", [3, 120, 500, 900, 5000, 300_000])
def test_deep_nesting(run: Run, levels: int) -> None:
    with Stranger(run.endpoint) as stranger:
        stranger.send(wire.deep(levels))
        message = stranger.recv()
        while not ends(message):
            message = stranger.recv()
        if levels > 1000 or isinstance(message, Failure):
            assert isinstance(message, Failure)
            assert message.code == 400
            assert len(encode(message)) < MAX_ECHO


@settings(fuzzed, max_examples=60)
@given(submit=wire.extreme())
def test_settings_at_the_ends_of_their_ranges(run: Run, submit: Submit) -> None:
    """Each answer comes to an end, with no more tokens than asked for."""
    with Stranger(run.endpoint) as stranger:
        stranger.send(encode(submit))
        open_answers = submit.params.n
        counts = [0] * open_answers
        while open_answers:
            message = stranger.recv()
            if isinstance(message, Failure):
                assert message.code == 400, message
                return
            assert isinstance(message, Chunk)
            counts[message.index] += len(message.token_ids)
            open_answers -= message.finish_reason is not None
        assert max(counts) <= submit.params.max_tokens


DEEP = {
    "$ref": "#/$defs/0",
    "$defs": {f"{n}": {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(1400)} | {"1400": {}},
}
PATHOLOGICAL = [
    {"type": "regex", "regex": "(a{1,1000}){1,1000}"},
    {"type": "regex", "regex": "(x+x+)+y"},
    {"type": "regex", "regex": "(" * 3000 + ")" * 3000},
    {"type": "regex", "regex": ".{0,60000}x.{0,60000}"},
    {"type": "regex", "regex": "|".join("ab" * n + "[c-f]*g" for n in range(200))},
    {"type": "regex", "regex": "[^\\x00-\\U0010FFFF]"},
    {"type": "choice", "choice": ["a" * 60_000]},
    {"type": "choice", "choice": [f"{n}" for n in range(8000)]},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"schema": {"allOf": [{"$ref": "#"}] * 50}}},
    {"type": "json_schema", "json_schema": {"schema": DEEP}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "array", "minItems": 10**9}}},
    {"type": "json_schema", "json_schema": {"schema": {"pattern": "(a|b)*c{500}"}}},
    {
        "type": "json_schema",
        "json_schema": {
            "schema": {
                "type": "object",
                "properties": {f"p{n}": {"type": "string"} for n in range(1500)},
            }
        },
    },
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(PATHOLOGICAL)))
def test_grammars_made_to_hurt(run: Run, number: int) -> None:
    """Served or refused; the others go on meanwhile (see ``unharmed``)."""
    params = SamplingParams(max_tokens=12, response_format=PATHOLOGICAL[number])
    refusal: RequestError | None = None
    with Client(run.endpoint) as client:
        try:
            assert client.generate("x", params).finish_reason in ("stop", "length")
        except RequestError as error:
            refusal = error
    if refusal is not None:
        assert refusal.code == 400, refusal
        assert len(str(refusal)) < MAX_ECHO


def test_bytes_that_are_no_zeromq(run: Run) -> None:
    path = ipc_path(run.endpoint)
    before = run.counters()["frontend_failed_handshakes"]
    for data in wire.RAW_BYTES:
        for ending in ("half", "whole"):
            raw = wire.raw_connection(str(path))
            # It may hang up on us at any byte.
            with contextlib.closing(raw), contextlib.suppress(OSError):
                raw.sendall(data)
                if ending == "half":
                    raw.shutdown(socket.SHUT_WR)
                else:
                    raw.settimeout(0.05)
                while raw.recv(4096):
                    pass
    wait_for(lambda: run.counters()["frontend_failed_handshakes"] > before)


def test_strangers_of_every_kind(run: Run) -> None:
    """Sockets of the wrong type, identities that are in use, and clients that never read."""
    with Stranger(run.endpoint, zmq.REQ) as stranger:
        stranger.send(encode(Ask("q")))  # behind an empty frame
    for kind in (zmq.PUB, zmq.SUB, zmq.PUSH, zmq.PULL, zmq.PAIR, zmq.ROUTER):
        with Stranger(run.endpoint, kind):
            pass
    with Stranger(run.endpoint, identity=b"me") as first:
        first.send(encode(Submit(id="a", prompt="x", params=SamplingParams(max_tokens=2))))
        while not ends(first.recv()):
            pass
        with Stranger(
            run.endpoint, identity=b"me"
        ) as second:  # not let in while the other is there
            second.send(encode(Ask("q")))
            assert first.status()[0].id.startswith("status")
            assert not second.socket.poll(100)
    with Stranger(run.endpoint) as deaf:
        params = SamplingParams(max_tokens=400, ignore_eos=True, logprobs=20)
        for number in range(4):
            deaf.send(encode(Submit(id=f"{number}", prompt="long", params=params)))
        for _ in range(8000):
            deaf.send(encode(Ask("q")))
        deaf.send(encode(Cancel("0")))


def test_the_hub_takes_nonsense_too(run: Run) -> None:
    """Only this user reaches it, but a mistake there would end the group."""
    with Stranger(f"ipc://{run.folder / 'hub.sock'}") as stranger:
        before = run.counters()["hub_bad_messages"]
        for frames in (
            [b""],
            [b"\xc1"],
            [b"a", b"b", b"c"],
            [b"\x91" * 100_000],
            [wire.ENCODED[0]],
        ):
            stranger.send(*frames)
        for message in (
            {"type": "beat", "name": "target-0"},
            {"type": "ready", "name": "draft", "facts": {"peer": 2**60}},
            {"type": "failed", "name": "frontend", "message": "not really"},
            {"type": "hello", "name": "frontend", "pid": -1, "config_digest": "x" * 500_000},
            {"type": "hello", "name": "\0", "pid": 2**63, "config_digest": ""},
        ):
            stranger.send(encode(message))
        wait_for(lambda: run.counters()["hub_bad_messages"] == before + 5)


HEADS = [
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nContent-Length: 8\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /v1/chat HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /v1/models/%ff%00%2e%2e%2f HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\n" * 1000,
    b"\0" * 1000,
]


@settings(fuzzed, max_examples=40)
@given(data=st.sampled_from(HEADS) | st.binary(max_size=200), cut=st.integers(0, 300))
def test_bytes_that_are_no_http(run: Run, data: bytes, cut: int) -> None:
    connection = run.server.connection()
    connection.connect()
    with contextlib.closing(connection.sock) as raw, contextlib.suppress(OSError):
        raw.settimeout(0.05)
        raw.sendall(data[:cut] if cut < len(data) and cut % 2 else data)
        answer = b""
        while part := raw.recv(4096):
            answer += part
        assert not answer.startswith(b"HTTP/1.1 5"), answer
    reply = run.server.ask("GET", "/health")
    assert reply.status == 200, reply.body


def test_bad_http_is_an_error_of_openais_kind(run: Run) -> None:
    begun = time.monotonic()
    path = "/v1/completions"
    cases: list[tuple[bytes, int]] = [
        (b"{", 400),
        (b'{"model": "target", "prompt": "x", "tools": [1]}', 400),
        (b'{"model": "target", "prompt": 5}', 400),
        (b'{"model": "target", "prompt": "x", "max_tokens": 1e999}', 400),
        (b'{"model": "target", "prompt": "x", "temperature": NaN}', 400),
        (b'{"model": "other", "prompt": "x"}', 404),
        (b"[" * 50_000, 400),
        (b" " * (MAX_BODY + 1), 413),
    ]
    for body, status in cases:
        reply = run.server.ask("POST", path, body)
        assert (reply.status, set(reply.error)) == (status, {"message", "type", "param", "code"})
    assert time.monotonic() - begun < 10
