"""What random clients do to a running pipeline."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio

from ipc.messages.client import Submit
from ipc.sockets import ipc_path
from ssd_pipe.async_client import AsyncClient
from ssd_pipe.errors import RequestError
from tests import wire
from tests.soak_http import OverHttp
from tests.soak_questions import AMPLE, EXPIRED, LONG, QUESTIONS, params

PATIENCE = 30.0  # seconds any one action may take; longer is a hang
FAULT_AFTER = 1.0  # seconds in which every client has begun something
CUT = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
CLIENT = """
import sys
from ssd_pipe.client import Client
from ssd_pipe.errors import RequestError
with Client(sys.argv[1]) as client:
    while True:
        try:
            for chunk in client.stream("killed", max_tokens=400, ignore_eos=True):
                print("chunk", flush=True)
        except RequestError as error:
            if error.code != 429:  # the queue is full, which is an answer
                raise
"""


class Soak(OverHttp):
    """Clients that do random things, over ZeroMQ and over HTTP."""

    def __init__(self, endpoint: str, url: str, seed: int) -> None:
        super().__init__(seed)
        self._endpoint = endpoint
        self._url = url
        self._one_child = asyncio.Semaphore(1)
        self._actions: dict[Callable[[], Awaitable[None]], int] = {
            self.ask: 12,
            self.ask_alone: 6,
            self.leave: 6,
            self.vanish: 6,
            self.cancel: 4,
            self.late: 5,
            self.post: 6,
            self.post_stream: 6,
            self.post_late: 4,
            self.hang_up: 6,
            self.bad_http: 6,
            self.bad_message: 10,
            self.bad_bytes: 3,
            self.bad_request: 4,
            self.look: 3,
            self.flood: 1,
            self.kill_client: 1,
        }

    async def run(
        self,
        seconds: float,
        clients: int,
        only: Sequence[str] = (),
        fault: Callable[[], None] | None = None,
        may_cut: bool = False,
    ) -> None:
        """``clients`` at once, each doing one random thing after another, or one of ``only``.

        ``fault`` is done once all are busy; ``may_cut``: it may cost HTTP clients their answers,
        which are then counted.
        """
        self._may_cut = may_cut
        async with (
            AsyncClient(self._endpoint) as self._client,
            httpx.AsyncClient(base_url=self._url, timeout=PATIENCE) as self._http,
        ):
            if not self._answers:
                self._answers = [
                    await self._client.generate(prompt, params(settings))
                    for prompt, settings in QUESTIONS
                ]
            end = time.monotonic() + seconds
            if fault is not None:
                asyncio.get_running_loop().call_later(FAULT_AFTER, fault)
            await asyncio.gather(*(self._act(end, only) for _ in range(clients)))

    async def each_once(self) -> None:
        """Every action, one after another: whatever is made at first use is there afterwards."""
        await self.run(0, 0)
        async with (
            AsyncClient(self._endpoint) as self._client,
            httpx.AsyncClient(base_url=self._url, timeout=PATIENCE) as self._http,
        ):
            for action in self._actions:
                await self._guarded(action)

    async def _act(self, end: float, only: Sequence[str]) -> None:
        named = {getattr(a, "__name__", ""): (a, w) for a, w in self._actions.items()}
        chosen = [named[name] for name in only or named]
        actions, weights = [a for a, _ in chosen], [w for _, w in chosen]
        while time.monotonic() < end and not self.wrong:
            await self._guarded(self._random.choices(actions, weights)[0])

    async def _guarded(self, action: Callable[[], Awaitable[None]]) -> None:
        name = getattr(action, "__name__", "action")
        try:
            async with asyncio.timeout(PATIENCE):
                await action()
            self.done[name] += 1
        except RequestError as error:
            if error.code != 429:  # the queue is full, which is an answer
                self.wrong.append(f"{name}: {error.code} {error}")
            self.done["refused: queue full"] += 1
        except CUT:
            if not self._may_cut:
                self.wrong.append(f"{name}: {traceback.format_exc()}")
            self.done["cut off"] += 1
        except Exception:
            self.wrong.append(f"{name} after {self.done.total()} actions: {traceback.format_exc()}")

    # ------------------------------------------------------------ over ZeroMQ

    async def ask(self) -> None:
        prompt, settings, expected = self._question()
        self._check(prompt, await self._client.generate(prompt, params(settings)), expected)

    async def ask_alone(self) -> None:
        prompt, settings, expected = self._question()
        async with AsyncClient(self._endpoint) as client:
            result = await client.generate(prompt, params(settings), logprobs=2)
        self._check(prompt, result, expected)
        self._expect(len(result.logprobs) == len(result.token_ids), f"{prompt!r}: logprobs")

    async def leave(self) -> None:
        async with self._client.stream("leaving", LONG, n=2) as stream:
            for _ in range(self._random.randrange(4)):
                await anext(stream, None)

    async def cancel(self) -> None:
        stream = self._client.stream("cancelling", LONG)
        for _ in range(self._random.randrange(3)):
            await anext(stream, None)
        await stream.cancel()
        chunks = [chunk async for chunk in stream]
        last = chunks[-1].finish_reason if chunks else "length"
        self._expect(last in ("cancelled", "length"), f"cancelled, but ended with {last}")

    async def late(self) -> None:
        """Deadlines that are missed, kept, and left behind."""
        try:
            too_short = msgspec.structs.replace(LONG, timeout=self._moment())
            result = await self._client.generate("running out", too_short)
            self._expect(result.finish_reason == "length", f"late, but ended with {result}")
        except RequestError as error:
            if error.code != 504:
                raise
            self.done[EXPIRED] += 1
        prompt, settings, expected = self._question()
        ample = params(settings | {"timeout": AMPLE})
        self._check(prompt, await self._client.generate(prompt, ample), expected)
        left = msgspec.structs.replace(LONG, timeout=AMPLE)
        async with self._client.stream("left with a deadline", left) as stream:
            await anext(stream, None)

    async def vanish(self) -> None:
        """No goodbye: a few requests, a look at the answers perhaps, and the connection is gone."""
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._endpoint)
            requests = self._random.randrange(1, 4)
            for number in range(requests):
                submit = Submit(id=f"{number}", prompt="vanishing", params=LONG)
                await socket.send(wire.encode(submit))
            # One answer each is sure to come, also where the queue is full.
            for _ in range(self._random.randrange(requests + 1)):
                await socket.recv()

    async def bad_message(self) -> None:
        """Several, and after each the line still answers."""
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._endpoint)
            for _ in range(5):
                frames = self._bad_frames()
                if not wire.is_message(frames):
                    await socket.send_multipart(frames)
                    await socket.recv()

    def _bad_frames(self) -> list[bytes]:
        if self._random.random() < 0.1:
            return self._random.choice(wire.ODD_FRAMES)
        data = bytearray(self._random.choice(wire.ENCODED))
        for _ in range(self._random.randrange(1, 6)):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return [bytes(data)]

    async def bad_bytes(self) -> None:
        """Not even ZeroMQ."""
        _, writer = await asyncio.open_unix_connection(str(ipc_path(self._endpoint)))
        try:
            writer.write(self._random.choice(wire.RAW_BYTES))
            await writer.drain()
            await asyncio.sleep(self._random.random() * 0.05)
        except OSError:
            pass  # it has hung up on us
        finally:
            writer.close()

    async def bad_request(self) -> None:
        wrong: list[dict[str, Any]] = [
            {"prompt": ""},
            {"prompt": "x" * 100_000},
            {"token_ids": [1] * 10_000},
            {"token_ids": [10**9]},
            {"prompt": "x", "top_p": 7.0},
            {"prompt": "x", "response_format": {"type": "regex", "regex": "("}},
        ]
        try:
            await self._client.generate(**self._random.choice(wrong))
        except RequestError as error:
            if error.code != 400:
                raise
        else:
            self.wrong.append("a bad request was served")

    async def flood(self) -> None:
        """More than the queue holds, and then none of it is wanted."""
        async with AsyncClient(self._endpoint) as client:
            streams = [client.stream("flood", LONG, n=32) for _ in range(4)]
            refused = 0
            for stream in streams:
                try:
                    await anext(stream, None)
                except RequestError as error:
                    refused += error.code == 429
                await stream.aclose()
            self._expect(refused > 0, "the queue took more than it holds")

    async def kill_client(self) -> None:
        async with self._one_child:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CLIENT, self._endpoint, stdout=asyncio.subprocess.PIPE
            )
            assert child.stdout is not None
            line = await child.stdout.readline()
            self._expect(line == b"chunk\n", f"the client to be killed said {line!r}")
            child.kill()
            await child.wait()
