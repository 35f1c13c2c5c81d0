"""What random clients do to a running pipeline, and what it must hold afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import zmq
import zmq.asyncio

from ipc.messages import Submit
from ipc.sockets import ipc_path
from ssd_pipe.async_client import AsyncClient
from ssd_pipe.client import Result
from ssd_pipe.errors import RequestError
from ssd_pipe.params import SamplingParams
from tests import wire

PATIENCE = 30.0  # seconds any one action may take; longer is a hang
LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=1.0)
GREEDY = {"temperature": 0.0}  # over HTTP it is 1 unless told
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("greedy", GREEDY | {"max_tokens": 30, "ignore_eos": True}),
    ("sampled 🙂", {"max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True}),
    ("filtered", {"max_tokens": 30, "temperature": 0.9, "top_p": 0.8, "top_k": 50, "seed": 6}),
    ("a prompt of several chunks " * 8, {"max_tokens": 20, "temperature": 0.5, "seed": 1}),
    ("penalties", GREEDY | {"max_tokens": 30, "repetition_penalty": 1.3, "frequency_penalty": 0.4}),
    (
        "stops",
        GREEDY | {"max_tokens": 60, "stop": ["a", "e "], "min_tokens": 3, "ignore_eos": True},
    ),
    ("bias", GREEDY | {"max_tokens": 25, "logit_bias": {70: 5.0}, "stop_token_ids": [71]}),
    (
        "shape",
        GREEDY
        | {"max_tokens": 40, "response_format": {"type": "regex", "regex": "[a-f]{4,9}-[0-9]+"}},
    ),
]
CLIENT = """
import sys
from ssd_pipe.client import Client
with Client(sys.argv[1]) as client:
    for chunk in client.stream("killed", max_tokens=400, ignore_eos=True):
        print("chunk", flush=True)
"""


def params(settings: dict[str, Any]) -> SamplingParams:
    """Settings as the HTTP API takes them, as ours."""
    tuples = {k: tuple(settings[k]) for k in ("stop", "stop_token_ids") if k in settings}
    return SamplingParams(**settings | tuples)


@dataclass(frozen=True)
class Snapshot:
    """What a group of processes holds. Resident bytes are kept apart: they may grow a little."""

    files: dict[str, int]
    threads: dict[str, int]
    mapped: dict[str, int]
    run_dir: dict[str, int]
    blocks: dict[str, float]
    resident: dict[str, int] = field(compare=False)

    @classmethod
    def take(cls, pids: dict[str, int], run_dir: Path, counters: dict[str, float]) -> Snapshot:
        processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        return cls(
            files={name: p.num_fds() for name, p in processes.items()},
            threads={name: p.num_threads() for name, p in processes.items()},
            mapped={name: _mapped(p.pid, run_dir) for name, p in processes.items()},
            run_dir={str(f.relative_to(run_dir)): f.stat().st_size for f in run_dir.rglob("*")},
            blocks={name: n for name, n in counters.items() if name.endswith("_blocks")},
            resident={name: p.memory_info().rss for name, p in processes.items()},
        )

    def difference(self, before: Snapshot, without: str = "") -> str:
        """What is not as it was, one line; empty if all is. ``without``: a process left out."""
        parts = []
        for name in ("files", "threads", "mapped", "run_dir", "blocks"):
            then, now = getattr(before, name), getattr(self, name)
            changed = {k for k in then.keys() | now.keys() if then.get(k) != now.get(k)}
            changed.discard(without)
            parts += [f"{name} of {k}: {then.get(k)} -> {now.get(k)}" for k in sorted(changed)]
        return "; ".join(parts)


def _mapped(pid: int, run_dir: Path) -> int:
    """Mappings of shared-memory files of the run."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(str(run_dir) in line for line in lines)


class Soak:
    """Attributes: ``done`` counts actions, ``wrong`` holds what must not have happened."""

    def __init__(self, endpoint: str, url: str, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._endpoint = endpoint
        self._url = url
        self._random = random.Random(seed)
        self._answers: list[Result] = []
        self._one_child = asyncio.Semaphore(1)
        self._actions: dict[Callable[[], Awaitable[None]], int] = {
            self.ask: 12,
            self.ask_alone: 6,
            self.leave: 6,
            self.vanish: 6,
            self.cancel: 4,
            self.post: 6,
            self.post_stream: 6,
            self.hang_up: 6,
            self.bad_http: 6,
            self.bad_message: 10,
            self.bad_bytes: 3,
            self.bad_request: 4,
            self.look: 3,
            self.flood: 1,
            self.kill_client: 1,
        }

    async def run(self, seconds: float, clients: int, only: Sequence[str] = ()) -> None:
        """``clients`` at once, each doing one random thing after another, or one of ``only``."""
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
        except Exception:
            self.wrong.append(f"{name} after {self.done.total()} actions: {traceback.format_exc()}")

    def _expect(self, good: bool, what: str) -> None:
        if not good:
            self.wrong.append(what)

    def _question(self) -> tuple[str, dict[str, Any], Result]:
        number = self._random.randrange(len(QUESTIONS))
        return *QUESTIONS[number], self._answers[number]

    def _check(self, prompt: str, result: Result, expected: Result) -> None:
        same = (result.text, result.token_ids, result.finish_reason) == (
            expected.text,
            expected.token_ids,
            expected.finish_reason,
        )
        self._expect(same, f"{prompt!r}: {result} instead of {expected}")

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

    async def vanish(self) -> None:
        """No goodbye: a few requests, a look at the answers perhaps, and the connection is gone."""
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._endpoint)
            for number in range(self._random.randrange(1, 4)):
                submit = Submit(id=f"{number}", prompt="vanishing", params=LONG)
                await socket.send(wire.encode(submit))
            for _ in range(self._random.randrange(3)):
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

    # ------------------------------------------------------------ over HTTP

    async def post(self) -> None:
        prompt, settings, expected = self._question()
        reply = await self._http.post("/v1/completions", json={"prompt": prompt} | settings)
        if self._served(reply):
            [choice] = reply.json()["choices"]
            self._expect(choice["text"] == expected.text, f"HTTP {prompt!r}: {choice}")

    async def post_stream(self) -> None:
        prompt, settings, expected = self._question()
        body = {"prompt": prompt, "stream": True} | settings
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            if not self._served(reply):
                return
            lines = [line[6:] async for line in reply.aiter_lines() if line.startswith("data: ")]
        if lines[-1] != "[DONE]":
            self._expect("rate_limit_exceeded" in lines[-1], f"HTTP {prompt!r}: {lines[-1]}")
            return
        events = [json.loads(line) for line in lines[:-1]]
        text = "".join(c["text"] for event in events for c in event["choices"])
        self._expect(text == expected.text, f"HTTP {prompt!r}: {text!r}")

    async def hang_up(self) -> None:
        body = {"prompt": "hanging up", "stream": True, "max_tokens": 400, "ignore_eos": True}
        body |= {"n": self._random.randrange(1, 4)}
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            if self._served(reply):
                lines = reply.aiter_lines()
                for _ in range(self._random.randrange(4)):
                    await anext(lines, None)

    async def bad_http(self) -> None:
        wrong: list[tuple[bytes, int]] = [
            (b"{", 400),
            (b'{"prompt": 5}', 400),
            (b'{"prompt": "x", "tempreature": 1}', 400),
            (b'{"prompt": "x", "model": "other"}', 404),
            (b"[" * 5000, 400),
            (b" " * 10_000_000, 413),
        ]
        body, status = self._random.choice(wrong)
        headers = {"Content-Type": "application/json"}
        reply = await self._http.post("/v1/completions", content=body, headers=headers)
        self._expect(reply.status_code == status, f"{body[:30]!r}: {reply.status_code}")

    async def look(self) -> None:
        for path in ("/health", "/metrics", "/v1/models"):
            reply = await self._http.get(path)
            self._expect(reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}")
        await self._client.status()

    def _served(self, reply: httpx.Response) -> bool:
        self._expect(reply.status_code in (200, 429), f"HTTP {reply.status_code}")
        return reply.status_code == 200
