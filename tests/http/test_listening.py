"""What a gateway says of the address it listens at."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.http.server import PlayedFrontend, gateway_before


@pytest.mark.parametrize(
    ("host", "bound", "warned"),
    [
        ("127.0.0.1", "127.0.0.1", False),
        ("localhost", "127.0.0.1", False),
        ("0.0.0.0", "0.0.0.0", True),
        ("localhost.example.com", "0.0.0.0", True),
        ("127.example.org", "0.0.0.0", True),
        ("box.example.org", "127.0.0.1", False),
    ],
)
def test_a_gateway_without_a_key_that_others_reach_is_warned_of(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, host: str, bound: str, warned: bool
) -> None:
    look_up = socket.getaddrinfo

    def names(name: Any, *arguments: Any, **more: Any) -> Any:
        return look_up(bound if name == host else name, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", names)
    with (
        contextlib.closing(PlayedFrontend(shm_dir, [])) as frontend,
        gateway_before(frontend, host=host),
    ):
        log = (shm_dir / "gateway.jsonl").read_text()
    assert ("without an API key" in log) is warned
