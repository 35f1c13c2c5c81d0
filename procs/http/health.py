"""Whether the pipeline can serve, asked of the pipeline itself."""

from __future__ import annotations

import asyncio

import msgspec

from ipc.messages import ProcessState, StatusReply
from ssd_pipe.async_client import AsyncClient
from ssd_pipe.errors import SsdPipeError

DEADLINE = 3.0  # seconds the pipeline may take to say how it is
FRESH = 0.9  # seconds; an older state than this is a scheduler's that did not answer


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """``status`` is "ok" or "unavailable", then ``reason`` says why. ``notes``: ProcessState's."""

    status: str
    reason: str = ""
    processes: dict[str, str] = {}
    notes: dict[str, dict[str, str]] = {}


async def examine(client: AsyncClient, beat_timeout: float) -> Health:
    """Ask once more while the scheduler is only busy; never longer than DEADLINE.

    A process counts as stuck after half of ``beat_timeout`` seconds without a heartbeat, which
    is before the rest of the group gives it up.
    """
    reply: StatusReply | None = None
    reason = ""
    try:
        async with asyncio.timeout(DEADLINE):
            while True:
                reply = await client.status()
                if 0 <= reply.age < FRESH:
                    break
    except TimeoutError:
        who = "frontend" if reply is None else "scheduler"
        reason = f"{who}: no answer within {DEADLINE:g} s"
    except SsdPipeError:
        reason = "frontend: not there"
    processes = reply.processes if reply is not None else ()
    reason = reason or next((r for p in processes if (r := _ailment(p, beat_timeout))), "")
    return Health(
        status="unavailable" if reason else "ok",
        reason=reason,
        processes={p.name: p.state for p in processes},
        notes={p.name: p.notes for p in processes if p.notes},
    )


def _ailment(process: ProcessState, beat_timeout: float) -> str:
    if process.state != "ready":
        return f"{process.name}: {process.detail or process.state}"
    if process.silent > beat_timeout / 2:
        return f"{process.name}: no heartbeat for {process.silent:.1f} s"
    return ""
