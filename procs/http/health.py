"""Whether the pipeline can serve, asked of the pipeline itself."""

from __future__ import annotations

import asyncio

import msgspec

from ipc.messages.client import StatusReply
from ipc.messages.hub import ProcessState
from ssd_pipe.async_client import AsyncClient
from ssd_pipe.config import RunSection
from ssd_pipe.errors import SsdPipeError

DEADLINE = 3.0  # seconds the pipeline may take to say how it is
FRESH = 0.9  # seconds; an older state than this is a scheduler's that did not answer


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """``status`` is "ok", "degraded" (every request is served, but without speculation) or
    "unavailable"; ``reason`` says why. ``notes``: ProcessState's."""

    status: str
    reason: str = ""
    processes: dict[str, str] = {}
    notes: dict[str, dict[str, str]] = {}


async def examine(client: AsyncClient, run: RunSection) -> Health:
    """Ask once more while the scheduler is only busy; never longer than DEADLINE.

    A process counts as stuck after half of ``run.beat_timeout`` seconds without a heartbeat, which
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
    states = {p.name: p.state for p in processes}
    notes = {p.name: p.notes for p in processes if p.notes}
    ailments = {p.name: ill for p in processes if (ill := _ailment(p, run.beat_timeout))}
    spared = {n for n in ailments if run.on_draft_failure == "degrade" and n.startswith("draft")}
    reason = reason or next((ill for n, ill in ailments.items() if n not in spared), "")
    status = "unavailable"
    if not reason:
        reason = reply.degraded if reply is not None else ""
        reason = reason or next((ailments[n] for n in ailments), "")
        status = "degraded" if reason else "ok"
    return Health(status=status, reason=reason, processes=states, notes=notes)


def _ailment(process: ProcessState, beat_timeout: float) -> str:
    if process.state != "ready":
        return f"{process.name}: {process.detail or process.state}"
    if process.silent > beat_timeout / 2:
        return f"{process.name}: no heartbeat for {process.silent:.1f} s"
    return ""
