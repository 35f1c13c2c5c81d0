"""The pipelines of this user on this machine: which there are, how they are, and their end.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from ipc import runlock
from ipc.messages.client import StatusReply
from ipc.messages.hub import ProcessState
from ipc.run_files import RunFiles
from ipc.rundir import OWNED, find_run, list_runs
from ssd_pipe.async_client import AsyncClient
from ssd_pipe.config import PipelineConfig
from ssd_pipe.config_load import config_of
from ssd_pipe.endpoint import PUBLIC_SOCKET, local_endpoint
from ssd_pipe.errors import ResourceError, SsdPipeError
from ssd_pipe.gateway_address import address, usable_endpoint
from ssd_pipe.members import HUB_ROLE, STOP_STAGES, process_title
from ssd_pipe.run_control import request_stop, supervisor_pid

ANSWER_WAIT = 2.0  # seconds for a pipeline to say how it is
STOP_MARGIN = 10.0  # seconds beyond a run's own grace time until it must be gone
OWN_END = 1.0  # seconds for a process whose hub has ended to end too
POLL = 0.02
WORST_FIRST = ("dead", "stopping", "starting", "ready")
"""States of a process: the worst one is the pipeline's."""


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """One live run.

    Attributes:
        state: "starting", "ready", "degraded", "stopping", "dead", or "no answer".
        pid: of the supervisor; 0 if the processes were started one by one.
        url: of the HTTP gateway, empty without one.
        since: when the run began, in seconds since 1970.
        running, waiting: requests.
        pids: of the processes by name, as the pipeline itself says.
    """

    name: str
    state: str
    mode: str = ""
    target: str = ""
    draft: str = ""
    pid: int = 0
    endpoint: str
    url: str = ""
    since: float
    running: int = 0
    waiting: int = 0
    pids: dict[str, int] = {}


def list_pipelines(shm_dir: str) -> list[Pipeline]:
    """All live runs under ``shm_dir``, by name. Raises ResourceError as ``list_runs``."""
    names = list_runs(shm_dir)

    async def examine() -> list[Pipeline | None]:
        return await asyncio.gather(*(_examine(shm_dir, name) for name in names))

    return [found for found in asyncio.run(examine()) if found is not None]


def choose_runs(shm_dir: str, names: list[str], every: bool) -> list[str]:
    """Which live runs are meant.

    Those named. Else not those that programs have for themselves: with ``every`` all others,
    without it the only other one. Raises ResourceError if there is no such run, or several.
    """
    live = list_runs(shm_dir)
    if every:
        return [name for name in live if not name.startswith(OWNED)]
    for name in names:
        if name not in live:
            others = f"; there are: {', '.join(live)}" if live else ""
            raise ResourceError(f"no run {name!r} in {shm_dir}{others}")
    return list(dict.fromkeys(names)) or [find_run(shm_dir, owned=False).name]


def end_runs(shm_dir: str, names: Sequence[str]) -> Iterator[str]:
    """Ask all these runs to end in order, then yield the name of each that is gone.

    One that cannot be ended keeps none of the others: after the last, ResourceError is raised
    with what went wrong. One that has gone meanwhile has ended.
    """
    limits, errors = {}, []
    for name in names:
        try:
            limits[name] = begin_stop(shm_dir, name)
        except (OSError, ResourceError) as error:
            if name in list_runs(shm_dir):
                errors.append(str(error))
            else:
                limits[name] = 0.0
    for name, seconds in limits.items():
        try:
            await_end(shm_dir, name, seconds)
        except ResourceError as error:
            errors.append(str(error))
        else:
            yield name
    if errors:
        raise ResourceError("; ".join(errors))


def begin_stop(shm_dir: str, name: str) -> float:
    """Ask a run to end in order; returns the seconds that it may take.

    A supervisor is told in the run directory. Processes that were started one by one get SIGTERM,
    in the order in which a supervisor would end them. Raises ResourceError if there is no such
    run, or its processes do not say which they are, or end too slowly, and OSError if the
    supervisor cannot be told.
    """
    run = _files(shm_dir, name)
    config = config_of(run)
    grace = config.run.grace if config is not None else PipelineConfig().run.grace
    if supervisor_pid(run):
        with contextlib.suppress(FileNotFoundError):  # it has just gone
            request_stop(run)
        return grace + STOP_MARGIN
    found = asyncio.run(_examine(shm_dir, name))
    if found is not None:
        _end_one_by_one(found, grace)
    return STOP_MARGIN


def await_end(shm_dir: str, name: str, seconds: float) -> None:
    """Until the run is gone. Raises ResourceError if that takes longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    while name in list_runs(shm_dir):
        if time.monotonic() > deadline:
            pid = supervisor_pid(_files(shm_dir, name))
            whose = f"; its supervisor is process {pid}" if pid else ""
            raise ResourceError(f"run {name!r} is still there after {seconds:g} s{whose}")
        time.sleep(POLL)


def _files(shm_dir: str, name: str) -> RunFiles:
    return RunFiles(find_run(shm_dir, name))


async def _examine(shm_dir: str, name: str) -> Pipeline | None:
    """None if the run has just gone."""
    try:
        run = _files(shm_dir, name)
        made = run.config if run.config.exists() else run.path
        since = made.stat().st_mtime
    except (OSError, ResourceError):
        return None
    config, local = config_of(run), local_endpoint(run)
    reply: StatusReply | None = None
    listening = run.socket(PUBLIC_SOCKET).exists()
    if listening:
        with contextlib.suppress(TimeoutError, SsdPipeError):
            async with asyncio.timeout(ANSWER_WAIT), AsyncClient(local) as client:
                reply = await client.status()
    processes = reply.processes if reply is not None else ()
    own = usable_endpoint(config.run.endpoint) if config is not None else ""
    return Pipeline(
        name=name,
        state=state_of(reply) if reply else "no answer" if listening else "starting",
        mode=config.mode if config is not None else "",
        target=config.target.model if config is not None else "",
        draft=config.draft.model if config is not None and config.speculative else "",
        pid=supervisor_pid(run),
        endpoint=own or local,
        url=_url(config, processes),
        since=since,
        running=reply.running if reply is not None else 0,
        waiting=reply.waiting if reply is not None else 0,
        pids={process.name: process.pid for process in processes},
    )


def starting_run(endpoint: str) -> str:
    """Name of a live run that is to listen at this socket in its directory and does not yet; else
    empty."""
    path = Path(endpoint.removeprefix("ipc://"))
    if not endpoint.startswith("ipc://") or path.exists():
        return ""
    lock = runlock.open_lock(path.parent)
    if lock is None:
        return ""
    try:
        return path.parent.name if runlock.held(lock) else ""
    finally:
        os.close(lock)


def state_of(reply: StatusReply) -> str:
    """Pipeline's ``state``, of one that answers."""
    if reply.degraded:
        return "degraded"
    states = {process.state for process in reply.processes}
    return next((state for state in WORST_FIRST if state in states), "starting")


def _url(config: PipelineConfig | None, processes: tuple[ProcessState, ...]) -> str:
    ports = [process.port for process in processes if process.port]
    return address(config.gateway, ports[0]) if config is not None and ports else ""


def _end_one_by_one(run: Pipeline, grace: float) -> None:
    if not run.pids:
        raise ResourceError(f"run {run.name!r} has no supervisor and does not say what runs in it")
    patience, found = 0.0, 0
    for roles in STOP_STAGES:
        with contextlib.ExitStack() as held:
            stage = {
                fd: pid
                for name, pid in run.pids.items()
                if name.partition("-")[0] in roles and (fd := _open(name, pid, held)) is not None
            }
            found += len(stage)
            # Once the hub has ended, the others do so by themselves.
            for fd in _still_there(list(stage), patience):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGTERM)
            late = _still_there(list(stage), grace)
            if late:
                pids = ", ".join(str(stage[fd]) for fd in late)
                reason = f"process {pids} has not ended within {grace:g} s"
                raise ResourceError(f"run {run.name!r}: {reason}")
        if HUB_ROLE in roles:
            patience = OWN_END
    if not found:
        raise ResourceError(
            f"run {run.name!r}: none of its processes is found here (in another container?)"
        )


def _open(name: str, pid: int, held: contextlib.ExitStack) -> int | None:
    """A descriptor of the process, None if it has gone or the number means another one here, as
    in another container: it calls itself otherwise."""
    try:
        fd = os.pidfd_open(pid)
        held.callback(os.close, fd)
        process = psutil.Process(pid)
        ours = process.uids().real == os.getuid() and process.name() == process_title(name)
    except (OSError, psutil.Error):
        return None
    return fd if ours else None


def _still_there(fds: list[int], seconds: float) -> list[int]:
    """Those of the processes that have not ended within ``seconds``."""
    deadline, left = time.monotonic() + seconds, list(fds)
    while left:
        rest = max(0.0, deadline - time.monotonic())
        ended = select.select(left, [], [], rest)[0]
        left = [fd for fd in left if fd not in ended]
        if not ended:
            break
    return left
