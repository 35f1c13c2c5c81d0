"""Frontend process: owns the public endpoint, text in both directions, and clients' rights.

Everything runs on one event loop; only tokenizing long texts leaves it. A client's mistake is
answered with a Failure and touches nobody else; a client that is gone has its requests dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any

import uvloop

from ipc.curve import KnownClients
from ipc.messages.client import Ask, Cancel, Chunk, StatusReply, Submit
from ipc.messages.requests import (
    AbortRequest,
    AddRequest,
    Rejected,
    StatsRequest,
    TokensOut,
)
from models.config import ModelConfig
from procs.client_port import ClientPort
from procs.file_limit import allow_files
from procs.intake import Intake
from procs.latest_stats import LatestStats
from procs.liveness import BEAT, farewell
from procs.open_request import OpenRequest
from procs.open_submits import Group, Key, OpenSubmits
from procs.runtime import Runtime
from procs.scheduler_port import SchedulerPort
from ssd_pipe.dimensions import dimensions
from ssd_pipe.endpoint import local_endpoint
from ssd_pipe.errors import RequestError
from ssd_pipe.hub import resolve
from ssd_pipe.preflight import read_keys
from ssd_pipe.text.answer import AnswerText
from ssd_pipe.text.detokenizer import DetokenizerFactory
from ssd_pipe.text.prepare import Prepared, Preparer
from ssd_pipe.text.tokenizer import Tokenizer

FAREWELL = 0.1  # seconds to read a Failure; libzmq drops what is unread at a disconnect
MAX_FILES = 1 << 16  # a client is one


def run(runtime: Runtime) -> None:
    """Body of the process "frontend"."""
    allow_files(MAX_FILES)
    folder = resolve(runtime.config.target.model)
    sizes = dimensions(runtime.config)
    tokenizer = Tokenizer.load(folder)
    preparer = Preparer(
        tokenizer, ModelConfig.from_folder(folder).eos_ids, sizes.vocab_size, sizes.max_model_len
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        frontend = Frontend(runtime, preparer, DetokenizerFactory(tokenizer), sizes.max_model_len)
        runner.run(frontend.serve())


class Frontend:
    """The process's state; everything but long preparations happens on the event loop."""

    def __init__(
        self,
        runtime: Runtime,
        preparer: Preparer,
        detokenizers: DetokenizerFactory,
        max_model_len: int,
    ) -> None:
        self._runtime = runtime
        self._config = runtime.config
        self._intake = Intake(preparer, runtime.log, runtime.config.scheduler.max_waiting)
        self._detokenizers = detokenizers
        self._max_model_len = max_model_len
        self._open = OpenSubmits()
        self._new_rid = itertools.count(1)
        self._counters: Counter[str] = Counter()
        self._stats = LatestStats(self._ask_for_stats)
        self._tasks: set[asyncio.Task[None]] = set()
        self._port: ClientPort
        self._scheduler: SchedulerPort

    async def serve(self) -> None:
        """Until the stop flag is up. Raises PeerLost if the scheduler speaks nonsense."""
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()
        loop.add_reader(self._runtime.stopping.fileno(), stopping.set)
        with self._sockets():
            parts = [
                asyncio.create_task(part)
                for part in (self._read_clients(), self._read_scheduler(), self._beat())
            ]
            end = asyncio.create_task(stopping.wait())
            try:
                await asyncio.wait([*parts, end], return_when=asyncio.FIRST_COMPLETED)
            finally:
                loop.remove_reader(self._runtime.stopping.fileno())
                self._stop_all([*parts, end])
            # Also where the scheduler's refusals came first and nothing was left to be failed.
            await asyncio.sleep(self._port.failed_at + FAREWELL - time.monotonic())
            for task in parts:
                if task.done() and not task.cancelled():
                    task.result()

    @contextlib.contextmanager
    def _sockets(self) -> Iterator[None]:
        rundir = self._runtime.rundir
        with contextlib.ExitStack() as stack:
            stack.callback(self._intake.close)
            self._scheduler = SchedulerPort(rundir)
            stack.callback(self._scheduler.close)
            endpoint = local_endpoint(rundir)
            self._port = ClientPort(endpoint, self._client_gone, self._counters)
            stack.callback(self._port.close)
            endpoints = [endpoint, *self._open_to_others()]
            self._runtime.log.info("listening", endpoints=endpoints)
            yield

    def _open_to_others(self) -> list[str]:
        run = self._config.run
        if not run.endpoint:
            return []
        known = KnownClients(run.curve_clients) if run.curve_clients else None
        self._port.open_to_others(run.endpoint, read_keys(run), known)
        return [run.endpoint]

    # ------------------------------------------------------------ loops

    async def _read_clients(self) -> None:
        while True:
            client, message = await self._port.recv()
            if isinstance(message, Submit):
                self._submit(client, message)
            elif isinstance(message, Cancel):
                self._cancel(client, message)
            elif message.what == "status":
                self._spawn(self._answer(client, message))
            else:
                error = RequestError(400, f"unknown question {message.what!r}", "what")
                self._port.fail(client, message.id, error)
            # Of messages that are there already none is waited for, and many keep out all else.
            await asyncio.sleep(0)

    async def _read_scheduler(self) -> None:
        while True:
            message = await self._scheduler.recv()
            if isinstance(message, TokensOut):
                self._pass_on(message)
            elif isinstance(message, Rejected):
                self._refuse(message)
            else:
                self._stats.take(message)

    async def _beat(self) -> None:
        # It waits for the whole group; status is answered meanwhile.
        await asyncio.to_thread(self._runtime.ready, {"max_model_len": self._max_model_len})
        while True:
            self._runtime.alive()
            await asyncio.sleep(BEAT)

    # ------------------------------------------------------------ from clients

    def _submit(self, client: bytes, submit: Submit) -> None:
        arrived = time.monotonic_ns()
        key = (client, submit.id)
        group = self._open.begin(key, submit.params.n)
        if group is None:
            error = RequestError(400, f"{submit.id!r} is already in use", "id")
            self._port.fail(client, submit.id, error)
            return
        self._counters["requests"] += 1
        if self._intake.is_long(submit):
            self._spawn(self._submit_long(key, group, submit, arrived))
            return
        try:
            self._add(key, group, submit, self._intake.now(submit), arrived)
        except Exception as error:
            self._refuse_key(key, self._as_refusal(error, submit))

    async def _submit_long(self, key: Key, group: Group, submit: Submit, arrived: int) -> None:
        try:
            prepared = await self._intake.later(submit)
            if self._open.get(key) is group:  # else it was cancelled meanwhile
                self._add(key, group, submit, prepared, arrived)
        except Exception as error:
            if self._open.get(key) is group:
                self._refuse_key(key, self._as_refusal(error, submit))

    def _as_refusal(self, error: Exception, submit: Submit) -> RequestError:
        """What the client is told; a defect that one request brings to light fails that one."""
        if isinstance(error, RequestError):
            return error
        self._runtime.log.error("request failed", id=submit.id, exc_info=error)
        return RequestError(500, f"internal error: {type(error).__name__}: {error}")

    def _add(
        self, key: Key, group: Group, submit: Submit, prepared: Prepared, arrived: int
    ) -> None:
        self._counters["prompt_tokens"] += len(prepared.tokens) * group.answers
        params = submit.params
        if params.timeout is not None:
            left = params.timeout - (time.monotonic_ns() - arrived) * 1e-9
            group.deadline = asyncio.get_running_loop().call_later(
                max(0.0, left), self._expire, key, params.timeout
            )
        for index, noise in enumerate(prepared.keys):
            rid = next(self._new_rid)
            request = OpenRequest(
                client=key[0],
                id=key[1],
                rid=rid,
                answer=AnswerText(
                    self._detokenizers.new(special=not params.skip_special_tokens),
                    params.stop,
                    params.include_stop_str_in_output,
                    params.min_tokens,
                ),
                prompt_tokens=len(prepared.tokens),
                arrived_ns=arrived,
                speculative=self._config.speculative,
                synthetic=bool(self._config.speculation.synthetic_acceptance),
                index=index,
                thinking=prepared.thinking,
            )
            self._open.add(group, request)
            self._runtime.log.info("request", rid=rid, id=key[1], tokens=len(prepared.tokens))
            self._scheduler.send(
                AddRequest(
                    rid=rid,
                    tokens=prepared.tokens,
                    max_tokens=prepared.max_tokens,
                    key=noise,
                    stop_ids=prepared.stop_ids,
                    arrived_ns=arrived,
                    logprobs=-1 if params.logprobs is None else params.logprobs,
                )
            )

    def _cancel(self, client: bytes, message: Cancel) -> None:
        key = (client, message.id)
        group = self._open.get(key)
        if group is None:
            return  # it has just finished, or never was
        if not group.rids:  # still being tokenized
            self._open.close(key)
            for index in range(group.answers):
                last = Chunk(id=message.id, finish_reason="cancelled", index=index)
                self._port.send(client, last)
            return
        for request in self._open.requests_of(group):
            self._open.end(request)
            self._scheduler.send(AbortRequest(request.rid))
            self._port.send(client, request.cancelled())

    async def _answer(self, client: bytes, ask: Ask) -> None:
        stats = await self._stats.fresh()
        values = dict(stats.values) if stats else {}
        own = {f"frontend_{name}": float(n) for name, n in self._counters.items()}
        own["frontend_open_requests"] = float(len(self._open))
        self._port.send(
            client,
            StatusReply(
                id=ask.id,
                run=self._runtime.rundir.name,
                mode=self._config.mode,
                target=self._config.target.model,
                draft=self._config.draft.model if self._config.speculative else "",
                max_model_len=self._max_model_len,
                running=int(values.get("running", 0)),
                waiting=int(values.get("waiting", 0)),
                processes=tuple(stats.processes) if stats else (),
                counters=values | own,
                age=self._stats.age,
                degraded=stats.degraded if stats else "",
                synthetic=self._config.speculation.synthetic_acceptance,
            ),
        )

    def _ask_for_stats(self) -> None:
        self._scheduler.send(StatsRequest(next(self._new_rid)))

    def _client_gone(self, client: bytes) -> None:
        """Drop everything of a client whose connection is closed."""
        mine = self._open.of_client(client)
        if mine:
            self._counters["lost_clients"] += 1
            self._runtime.log.info("client gone", requests=len(mine))
        for key in mine:
            self._drop(key)

    # ------------------------------------------------------------ to clients

    def _pass_on(self, out: TokensOut) -> None:
        request = self._open.request(out.rid)
        if request is None:
            return  # aborted; these were under way
        was_stopped = request.stopped
        chunk = request.chunk(out, self._detokenizers.token_bytes)
        if chunk is None:
            return
        if chunk.finish_reason is not None:
            self._open.end(request)
            self._counters["finished"] += 1
            self._runtime.log.info("done", rid=request.rid, reason=chunk.finish_reason)
        elif request.stopped and not was_stopped:
            self._scheduler.send(AbortRequest(request.rid, "stop"))
        self._port.send(request.client, chunk)

    def _refuse(self, refused: Rejected) -> None:
        key = self._open.lose(refused.rid)
        if key is not None:
            error = RequestError(refused.code, refused.message)
            error.field = refused.field  # the message names it already
            self._refuse_key(key, error)

    def _refuse_key(self, key: Key, error: RequestError) -> None:
        """Fail a Submit; no other answer to it goes on."""
        self._drop(key)
        self._counters["rejected"] += 1
        self._port.fail(*key, error)

    def _expire(self, key: Key, timeout: float) -> None:
        """Fail a Submit whose time is up, wherever its requests are."""
        self._drop(key)
        self._counters["timed_out"] += 1
        self._runtime.log.info("timed out", id=key[1], timeout=timeout)
        error = RequestError(504, f"the request has run out of time ({timeout:g} s)")
        self._port.fail(*key, error)

    def _drop(self, key: Key) -> None:
        """End a Submit and what the scheduler still does for it."""
        for rid in self._open.close(key):
            self._scheduler.send(AbortRequest(rid))

    # ------------------------------------------------------------ life

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._runtime.log.error("task failed", exc_info=error)

    def _stop_all(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Fail every request."""
        error = farewell(self._runtime.stopping.reason)
        for task in [*tasks, *self._tasks]:
            task.cancel()
        for key in list(self._open):
            self._open.close(key)
            self._port.fail(*key, error)
