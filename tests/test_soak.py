"""Random clients for a while: right answers all along, and nothing held afterwards that was not
held before. SSD_SOAK_SECONDS and SSD_SOAK_SEED say for how long and which."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ipc.sockets import ipc_path
from ssd_pipe.client import Client
from ssd_pipe.supervisor import Supervisor
from tests.http.server import Server, whole_pipeline
from tests.models.tiny import perturbed
from tests.pipelines import byte_model
from tests.snapshot import Snapshot
from tests.soak import Soak
from tests.soak_questions import EXPIRED
from tests.waiting import wait_for

SECONDS = float(os.environ.get("SSD_SOAK_SECONDS", "40"))
CLIENTS = 12
DRAFTLESS, GATEWAYLESS = 5.0, 2.0  # seconds of them in which the draft, then the gateway is killed
SETTLE = 30.0  # seconds for the last client's requests to end and connections to close
GROWTH = 64 << 20  # bytes of memory a process may have gained: caches, arenas


@pytest.mark.timeout(SECONDS + 300)
def test_soak(tmp_path: Path) -> None:
    seed = int(os.environ.get("SSD_SOAK_SEED") or secrets.randbelow(10**6))
    print(f"SSD_SOAK_SEED={seed} SSD_SOAK_SECONDS={SECONDS:g}")
    target = byte_model(tmp_path, "base", seed=1)
    settings: dict[str, Any] = {
        "draft.model": str(perturbed(target, tmp_path / "near", 0.1)),
        "draft.threads": 1,
        "speculation.backup": "jit",
        "speculation.adaptive": False,
        "scheduler.max_num_seqs": 4,
        "scheduler.max_batched_tokens": 64,
        "scheduler.max_waiting": 64,
        "cache.block_size": 4,
        "run.on_failure": "restart",  # so that the gateway comes back; nothing else is to go
    }
    with whole_pipeline(tmp_path, **settings) as (supervisor, server):
        path = ipc_path(supervisor.endpoint)
        assert path is not None
        with Client(supervisor.endpoint) as client:

            def snapshot() -> Snapshot:
                counters = client.status().counters
                busy = [counters[n] for n in ("running", "waiting", "frontend_open_requests")]
                taken = Snapshot.take(supervisor.pids, path.parent, counters)
                return taken if not any(busy) else Snapshot({}, {}, {}, {}, {}, {})

            soak = Soak(supervisor.endpoint, server.url, seed)
            asyncio.run(soak.each_once())
            assert soak.wrong == []
            before = steady(snapshot)
            begun, expired = client.status().counters, soak.done[EXPIRED]
            assert begun["free_blocks"] == begun["total_blocks"]
            assert begun["draft_free_blocks"] == begun["draft_total_blocks"]
            asyncio.run(soak.run(SECONDS, CLIENTS))
            assert soak.wrong == [], "\n".join([f"seed {seed}", *soak.wrong])
            wait_for(
                lambda: not snapshot().difference(before),
                SETTLE,
                lambda: snapshot().difference(before),
            )
            after = snapshot()
            ended = client.status().counters
            for name, bytes_before in before.resident.items():
                assert after.resident[name] - bytes_before < GROWTH, name
            # Who was told that time is up, and nobody else, ran out of it.
            expired = soak.done[EXPIRED] - expired
            assert ended["frontend_timed_out"] - begun.get("frontend_timed_out", 0) == expired > 0
            lose_the_draft(supervisor, soak, before, snapshot)
            assert client.status().counters["draft_losses"] == 1
            lose_the_gateway(supervisor, server, soak, before, snapshot)
        assert supervisor.failure == ""
        assert supervisor.restarts == 0
    for name in (
        "output_tokens",
        "finished_requests",
        "frontend_bad_messages",
        "frontend_rejected",
        "frontend_timed_out",
    ):
        print(f"{name} {ended[name] - begun.get(name, 0):.0f}")
    print(dict(soak.done))
    gained = {n: (after.resident[n] - b) >> 20 for n, b in before.resident.items()}
    print(f"MiB gained: {gained}")
    usual = ("ask", "post", "bad_message", "vanish", "late", "post_late")
    assert min(soak.done[name] for name in usual) > 0


def lose_the_draft(
    supervisor: Supervisor, soak: Soak, before: Snapshot, snapshot: Callable[[], Snapshot]
) -> None:
    """Killed while clients come and go: the answers stay right, it comes back, nothing is kept."""
    only = ("ask", "ask_alone", "leave", "vanish", "cancel", "post", "bad_message")
    lose("draft", supervisor, lambda fault: soak.run(DRAFTLESS, CLIENTS, only, fault))
    settle(soak, lambda: snapshot().difference(before, ("draft",)))


def lose_the_gateway(
    supervisor: Supervisor,
    server: Server,
    soak: Soak,
    before: Snapshot,
    snapshot: Callable[[], Snapshot],
) -> None:
    """Killed while it answers: clients of ZeroMQ notice nothing, those of HTTP are cut off where
    they are and then served on the same port, and nothing is kept for any of them."""
    only = ("ask", "leave", "late", "post", "post_stream", "post_late", "hang_up", "bad_http")
    cut = soak.done["cut off"]
    lose(
        "gateway",
        supervisor,
        lambda fault: soak.run(GATEWAYLESS, CLIENTS, only, fault, may_cut=True),
    )
    # Each may have had a request under way, and another on a connection that it thought open.
    assert soak.done["cut off"] - cut <= 2 * CLIENTS
    health = partial(server.ask, "GET", "/health")
    wait_for(lambda: health().status == 200, SETTLE, lambda: health().body)
    settle(soak, lambda: snapshot().difference(before, ("draft", "gateway")))


def lose(
    name: str,
    supervisor: Supervisor,
    meanwhile: Callable[[Callable[[], None]], Coroutine[None, None, None]],
) -> None:
    """Kill a process while clients come and go, until another one is in its place."""
    lost = supervisor.pids[name]
    asyncio.run(meanwhile(lambda: os.kill(lost, signal.SIGKILL)))
    wait_for(
        lambda: supervisor.pids.get(name, lost) != lost,
        SETTLE,
        lambda: f"the {name} has not come back",
    )


def settle(soak: Soak, left: Callable[[], str]) -> None:
    assert soak.wrong == [], "\n".join(soak.wrong)
    wait_for(lambda: not left(), SETTLE, left)


def steady(snapshot: Callable[[], Snapshot]) -> Snapshot:
    """The first one that is still true half a second later."""
    deadline = time.monotonic() + SETTLE
    last = snapshot()
    while time.monotonic() < deadline:
        time.sleep(0.5)
        taken = snapshot()
        if taken.files and taken == last:
            return taken
        last = taken
    raise AssertionError(f"never at rest: {last}")
