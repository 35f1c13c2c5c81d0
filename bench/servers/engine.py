"""An engine under test that is an OpenAI-compatible server: started here, or running already."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.engines import Answer, Facts
from bench.servers import metrics
from bench.servers.completions import Completions
from bench.servers.launch import HOST
from ssd_pipe.errors import PeerLost
from ssd_pipe.owned_process import OwnedProcess
from ssd_pipe.params import SamplingParams
from ssd_pipe.text.tokenizer import Tokenizer

READY_WITHIN = 900.0  # seconds; a large model's compilation takes minutes
POLL = 0.25
GRACE = 20.0  # seconds between TERM and KILL

Command = Callable[[int, Path], list[str]]
"""(port, scratch folder) -> command line."""


class ServerEngine:
    """A server spoken to through ``/v1/completions``.

    Args:
        command: starts it; None: it runs already, at ``url``.
        url: base URL, without ``/v1``.
        model: what it calls its model; empty asks it.
        tokenizer: of that model.
        deadline: seconds until ``/health`` must answer.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        command: Command | None = None,
        url: str = "",
        model: str = "",
        key: str = "",
        deadline: float = READY_WITHIN,
    ) -> None:
        self.name = name
        self.facts = Facts()
        self._make = command
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._key = key
        self._tokenizer = tokenizer
        self._deadline = deadline
        self._process: OwnedProcess | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._client: Completions | None = None
        self._settings: dict[str, Any] = {"engine": "server"}

    def start(self) -> None:
        if self._make is not None:
            port = free_port()
            self._scratch = tempfile.TemporaryDirectory(prefix="ssd-bench-")
            command = self._make(port, Path(self._scratch.name))
            self._url = f"http://{HOST}:{port}"
            self._settings["command"] = command
            self._process = OwnedProcess(command)
        self._client = Completions(self._url, self._model, self._key, self._tokenizer)

    def wait_ready(self) -> None:
        """Raises PeerLost if the server ends or is not healthy in time."""
        until = time.monotonic() + self._deadline
        while not self.client.healthy():
            words = self._process.last_words(POLL) if self._process is not None else None
            if words is not None:
                raise PeerLost(f"{self.name}: the server ended: {words[0]} {words[1][-400:]}")
            if time.monotonic() > until:
                raise PeerLost(f"{self.name}: {self._url}/health: not 200 in {self._deadline:g} s")
            if self._process is None:
                time.sleep(POLL)
        settings = {**self._settings, "url": self._url, "model": self.client.find_model()}
        self.facts = Facts(settings=settings)

    def generate(self, tokens: Sequence[int], params: SamplingParams) -> Answer:
        return self.client.generate(tokens, params)

    def counters(self) -> dict[str, float]:
        return metrics.counters(self.client.metrics())

    def stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        if self._process is not None:
            self._process.stop(GRACE)
            self._process = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    @property
    def client(self) -> Completions:
        if self._client is None:
            raise PeerLost(f"engine {self.name} is not running")
        return self._client


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
