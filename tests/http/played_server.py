"""An OpenAI-compatible server of somebody else's, played: it streams the events a test gives it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class PlayedServer(ThreadingHTTPServer):
    """``asked``: the bodies of the requests so far."""

    daemon_threads = True

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.events = events
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: PlayedServer

    def do_GET(self) -> None:
        self._answer("application/json", json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(json.loads(body))
        lines = [json.dumps(event) for event in self.server.events]
        self._answer("text/event-stream", "".join(f"data: {e}\n\n" for e in [*lines, "[DONE]"]))

    def log_message(self, *arguments: Any) -> None:
        """Not on the test's terminal."""

    def _answer(self, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def delta(index: int = 0, finish: str | None = None, **said: str | None) -> dict[str, Any]:
    """An event of one choice of a chat."""
    return {"choices": [{"index": index, "delta": said, "finish_reason": finish}]}


@contextlib.contextmanager
def played(*events: dict[str, Any]) -> Iterator[PlayedServer]:
    with PlayedServer(events) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
