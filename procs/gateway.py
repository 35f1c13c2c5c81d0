"""Gateway process: OpenAI-compatible HTTP in front of the public ZeroMQ endpoint.

To the pipeline it is one more client. It tells its state by HTTP status: before the group is ready
and when it goes down, /health and every request get 503 rather than a closed port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
import uvloop

from procs.file_limit import allow_files
from procs.http.app import api_key, build
from procs.http.service import Service
from procs.liveness import BEAT, SIGNALS
from procs.runtime import Runtime
from ssd_pipe.async_client import AsyncClient
from ssd_pipe.dimensions import dimensions
from ssd_pipe.endpoint import local_endpoint
from ssd_pipe.gateway_address import BACKLOG, address, inherit_or_listen, is_public

LAME_DUCK = 1.0  # seconds in which a gateway whose pipeline failed still says so
LINGER = 1  # seconds open connections get at the end
SPARE_FILES = 128  # descriptors besides connections


def run(runtime: Runtime) -> None:
    """Body of the process "gateway". Raises ResourceError if the port cannot be had."""
    with inherit_or_listen(runtime.config.gateway) as listener:
        max_model_len = dimensions(runtime.config).max_model_len
        allow_files(runtime.config.gateway.max_connections + SPARE_FILES)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(runtime, listener, max_model_len))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the runtime's."""
        yield


async def _serve(runtime: Runtime, listener: socket.socket, max_model_len: int) -> None:
    config = runtime.config
    port: int = listener.getsockname()[1]
    url = address(config.gateway, port)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_reader(runtime.stopping.fileno(), stopping.set)
    endpoint = local_endpoint(runtime.rundir)
    async with AsyncClient(endpoint, timeout=max(5.0, config.run.beat_timeout)) as client:
        service = Service(client, config, max_model_len, runtime.log)
        server = _server(service)
        serving = asyncio.create_task(server.serve([listener]))
        beating = asyncio.create_task(_beat(runtime, port))
        end = asyncio.create_task(stopping.wait())
        keyed = bool(api_key(config.gateway))
        runtime.log.info("listening", url=url, model=service.model_name, api_key=keyed)
        if not keyed and is_public(listener):
            runtime.log.warning("reachable from other machines without an API key", url=url)
        await asyncio.wait((serving, beating, end), return_when=asyncio.FIRST_COMPLETED)
        loop.remove_reader(runtime.stopping.fileno())
        reason = runtime.stopping.reason
        service.stopping = reason or "the gateway failed"
        await client.close(service.goodbye())  # open requests fail now
        if reason and reason not in SIGNALS:
            await asyncio.sleep(LAME_DUCK)
        server.should_exit = True
        await asyncio.wait((serving,))
        beating.cancel()
        end.cancel()
        for task in (serving, beating):
            if task.done() and not task.cancelled():
                task.result()


def _server(service: Service) -> _Server:
    return _Server(
        uvicorn.Config(
            build(service),
            loop="none",
            http="h11",  # bounds the size of request heads, which httptools does not
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            limit_concurrency=service.config.gateway.max_connections,
            timeout_graceful_shutdown=LINGER,
        )
    )


async def _beat(runtime: Runtime, port: int) -> None:
    # It waits for the whole group; requests are answered with 503 meanwhile.
    await asyncio.to_thread(runtime.ready, {"port": port})
    while True:
        runtime.alive()
        await asyncio.sleep(BEAT)
