"""Gateways for tests: before a whole pipeline of tiny models, or before a played scheduler."""

from __future__ import annotations

import contextlib
import http.client
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq

from ipc import sockets
from ipc.messages.client import Chunk, ClientMessage, Submit
from ipc.rundir import RunDir
from procs import gateway
from procs.liveness import StopFlag
from procs.runtime import Runtime
from ssd_pipe import logs
from ssd_pipe.config import GatewaySection, config_from_mapping
from ssd_pipe.config_load import load
from ssd_pipe.supervisor import Supervisor
from tests.frontend_peer import TEMPLATE, Pipeline, model_folder
from tests.pipelines import byte_model

KEY = "sesame"
WAIT = 30.0


class Reply:
    """A whole HTTP response."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error


class Server:
    """Where a gateway listens, and plain HTTP to it."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        parts = urlsplit(url)
        self._place = (parts.hostname or "", parts.port or 0)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self._place, timeout=WAIT)

    def send(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> http.client.HTTPConnection:
        """Send a request and read nothing; an empty header is left out."""
        connection = self.connection()
        given = self._headers | {k.replace("_", "-"): v for k, v in headers.items()}
        connection.request(method, path, body, {k: v for k, v in given.items() if v})
        return connection

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        """Send a request, read the response."""
        with contextlib.closing(self.send(method, path, body, **headers)) as connection:
            return Reply(connection.getresponse())

    def post(self, path: str, **fields: Any) -> Reply:
        return self.ask("POST", path, json.dumps(fields).encode())


@contextlib.contextmanager
def whole_pipeline(folder: Path, **settings: Any) -> Iterator[tuple[Supervisor, Server]]:
    """A real pipeline of byte models with a gateway, as ``ssd-pipe up --http`` starts it."""
    models = {role: byte_model(folder, role, seed=1) for role in ("target", "draft")}
    (models["target"] / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    ready_file = folder / "ready.json"
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="t-") as shm_dir:
        values = {
            "target.model": str(models["target"]),
            "draft.model": str(models["draft"]),
            "target.threads": 1,
            "speculation.adaptive": False,  # or it would seldom be tested with models this small
            "run.shm_dir": shm_dir,
            "run.log_dir": str(folder / "logs"),
            "run.log_level": "info",
            "gateway.enabled": True,
            "gateway.port": 0,
        }
        supervisor = Supervisor(load(None, values | settings), ready_file=ready_file)
        with supervisor:
            url = json.loads(ready_file.read_text())["http"]
            yield supervisor, Server(url, settings.get("gateway.api_key", ""))


class _Told(Runtime):
    """A runtime outside any group, that keeps what the gateway reports."""

    facts: dict[str, int]

    def ready(self, facts: dict[str, int]) -> dict[str, int]:
        self.facts = facts
        self.told.set()
        return super().ready(facts)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.told = threading.Event()


@contextlib.contextmanager
def gateway_before(
    pipeline: Pipeline | PlayedFrontend, **settings: Any
) -> Iterator[tuple[StopFlag, Server]]:
    """A gateway on a thread, before the frontend of a ``tests.frontend_peer`` pipeline."""
    section = GatewaySection(enabled=True, port=0, **settings)
    config = msgspec.structs.replace(pipeline.config, gateway=section)
    stopping = StopFlag()
    log = pipeline.log
    runtime = _Told("gateway", 0, config, pipeline.rundir, log, stopping, 1)
    thread = threading.Thread(target=gateway.run, args=(runtime,), daemon=True)
    thread.start()
    try:
        assert runtime.told.wait(WAIT)
        yield stopping, Server(f"http://127.0.0.1:{runtime.facts['port']}")
    finally:
        stopping.set("SIGTERM")
        thread.join(WAIT)
        assert not thread.is_alive()


class PlayedFrontend:
    """The public endpoint of a pipeline, played: it answers each Submit with given chunks.

    It has what ``gateway_before`` needs of a Pipeline.

    Attributes:
        submitted: what has been asked.
    """

    def __init__(self, folder: Path, chunks: list[Chunk]) -> None:
        self.rundir = RunDir.create(folder, "t")
        self.endpoint = self.rundir.endpoint("public")
        self.submitted: list[Submit] = []
        self._chunks = chunks
        model = folder / "model"
        model.mkdir()
        self.config = config_from_mapping(
            {
                "mode": "ar",
                "target": {"model": str(model_folder(model))},
                "run": {"shm_dir": str(folder)},
            }
        )
        self.log = logs.configure("gateway", folder / "gateway.jsonl", "info", False)
        self._socket = sockets.bind(zmq.ROUTER, self.endpoint)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            client, data = self._socket.recv_multipart()
            message = decoder.decode(data)
            if isinstance(message, Submit):
                self.submitted.append(message)
                for chunk in self._chunks:
                    answer = msgspec.structs.replace(chunk, id=message.id)
                    self._socket.send_multipart([client, msgspec.msgpack.encode(answer)])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(0)
        self.rundir.close()
        logs.close()
