"""An OpenAI-compatible server of somebody else's, played: it streams the events a test gives it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class PlayedServer(ThreadingHTTPServer):
    """``asked``: the bodies of the requests so far.

    Args:
        events: of every answer.
        form: how each of them is written.
        refused: fields that it knows not, nor in ``stream_options``.
        status, refusal: what a request with one of them gets.
    """

    daemon_threads = True

    def __init__(
        self,
        events: Sequence[Any],
        form: str = "data: {}\n\n",
        refused: Sequence[str] = (),
        status: int = 400,
        refusal: str = '{"error": "unknown field"}',
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer = "".join(
            form.format(event if isinstance(event, str) else json.dumps(event, ensure_ascii=False))
            for event in events
        )
        self.refused = set(refused)
        self.refusal = (status, refusal)
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: PlayedServer

    def do_GET(self) -> None:
        self._answer(200, "application/json", json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if self.server.refused & {*body, *body.get("stream_options", {})}:
            status, text = self.server.refusal
            self._answer(status, "text/plain", text)
        else:
            self._answer(200, "text/event-stream", self.server.answer)

    def log_message(self, *arguments: Any) -> None:
        """Not on the test's terminal."""

    def _answer(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def delta(index: int = 0, finish: str | None = None, **said: str | None) -> dict[str, Any]:
    """An event of one choice of a chat."""
    return {"choices": [{"index": index, "delta": said, "finish_reason": finish}]}


@contextlib.contextmanager
def played(*events: Any, whole: bool = True, **more: Any) -> Iterator[PlayedServer]:
    """A server of such ``events``, texts as they are; ``whole``: and of the last one, [DONE]."""
    with PlayedServer([*events, "[DONE]"] if whole else events, **more) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
