from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from ipc.messages.client import Chunk
from procs.client_port import ClientPort
from procs.error_text import MAX_TEXT
from ssd_pipe.errors import RequestError
from tests.wire import Stranger, encode


async def test_a_lost_client_is_told_of_after_the_send_that_found_out(shm_dir: Path) -> None:
    """Whoever sends may be going through that client's requests, which being told of it drops."""
    gone: list[bytes] = []
    port = ClientPort(f"ipc://{shm_dir}/s", gone.append, Counter())
    port.send(b"nobody", Chunk(id="a"))
    port.fail(b"nobody", "a", RequestError(400, "no"))
    assert gone == []
    await asyncio.sleep(0)
    assert gone == [b"nobody"] * 2
    port.close()


async def test_what_a_client_sent_is_not_sent_back_at_length(shm_dir: Path) -> None:
    counters: Counter[str] = Counter()
    port = ClientPort(f"ipc://{shm_dir}/s", lambda client: None, counters)
    with Stranger(f"ipc://{shm_dir}/s") as stranger:
        reading = asyncio.create_task(port.recv())
        for message in (
            {"type": "ask", "id": "i" * 10**6},
            {"type": "submit", "id": "q", "params": {"o" * 10**6: 1}},
            {"type": "t" * 10**6, "id": "q"},
        ):
            stranger.send(encode(message))
            failure = await asyncio.to_thread(stranger.recv)
            assert len(encode(failure)) < MAX_TEXT + 200
        assert counters["bad_messages"] == 3
        reading.cancel()
    port.close()
