"""What every engine under test looks like, and ours: a whole pipeline behind its public client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ssd_pipe.client import Client, Stream
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import SsdPipeError
from ssd_pipe.log_file import process_of
from ssd_pipe.params import SamplingParams
from ssd_pipe.relay import Relay
from ssd_pipe.supervisor import Supervisor


class Answer(msgspec.Struct, kw_only=True):
    """One finished request as its client saw it. Times are CLOCK_MONOTONIC seconds.

    Attributes:
        started: when the request was sent.
        arrivals: (time, tokens) of each piece that brought tokens.
        finish: "stop" or "length".
    """

    started: float
    arrivals: list[tuple[float, int]]
    tokens: list[int]
    finish: str


class Facts(msgspec.Struct, kw_only=True):
    """What an engine says about itself.

    Attributes:
        weight_bytes: target weights that one step reads, over all ranks; 0: unknown (a server).
        settings: everything needed to start it again.
    """

    weight_bytes: int = 0
    settings: dict[str, Any] = {}


class Engine(Protocol):
    """Something that continues token ids. ``start`` returns early, so that engines load together.

    Attributes:
        name: row name, unique in a comparison.
        facts: complete once ``wait_ready`` has returned.
    """

    name: str
    facts: Facts

    def start(self) -> None: ...

    def wait_ready(self) -> None: ...

    def generate(self, tokens: Sequence[int], params: SamplingParams) -> Answer:
        """Run one request alone. Raises SsdPipeError."""

    def counters(self) -> dict[str, float]:
        """Totals since start, empty if it counts nothing."""

    def stop(self) -> None:
        """End every process of the engine; idempotent."""


class PipelineEngine:
    """Our pipeline with ``config``, in processes of its own."""

    def __init__(self, name: str, config: PipelineConfig) -> None:
        self.name = name
        self.facts = Facts()
        # A pipeline that goes on without its draft is not what this row says it is.
        run = msgspec.structs.replace(config.run, on_draft_failure="fail")
        config = msgspec.structs.replace(config, run=run)
        self._supervisor = Supervisor(config, sink=Relay("warning"))
        self._client: Client | None = None

    def start(self) -> None:
        self._supervisor.start()

    def wait_ready(self) -> None:
        supervisor = self._supervisor
        supervisor.wait_ready()
        self._client = Client(supervisor.endpoint, timeout=120.0)
        loaded = read_loaded(supervisor.log_dir)
        weights = [int(f.get("weight_bytes", 0)) for n, f in loaded.items() if "target" in n]
        self.facts = Facts(
            weight_bytes=sum(weights),
            settings={
                "engine": "ssd-pipe",
                "config": msgspec.to_builtins(supervisor.config),
                "loaded": loaded,
                "log_dir": str(supervisor.log_dir),
            },
        )

    def generate(self, tokens: Sequence[int], params: SamplingParams) -> Answer:
        started = time.monotonic()
        with self.client.stream(token_ids=tokens, params=params) as stream:
            return _collect(stream, started)

    def generate_together(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Answer]:
        """Submit all at once, which the pipeline batches; arrival times are not meaningful."""
        started = time.monotonic()
        streams = [
            self.client.stream(token_ids=t, params=p) for t, p in zip(prompts, params, strict=True)
        ]
        return [_collect(stream, started) for stream in streams]

    def counters(self) -> dict[str, float]:
        return self.client.status().counters

    @property
    def mode(self) -> str:
        """ar, sd or ssd."""
        return self._supervisor.config.mode

    @property
    def log_dir(self) -> Path:
        """Where its processes log; known once it has started."""
        return self._supervisor.log_dir

    def stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._supervisor.stop("the benchmark is done with it")

    @property
    def client(self) -> Client:
        if self._client is None:
            raise SsdPipeError(f"engine {self.name} is not running")
        return self._client


def _collect(stream: Stream, started: float) -> Answer:
    answer = Answer(started=started, arrivals=[], tokens=[], finish="")
    for chunk in stream:
        if chunk.token_ids:
            answer.arrivals.append((time.monotonic(), len(chunk.token_ids)))
            answer.tokens += chunk.token_ids
        answer.finish = chunk.finish_reason or ""
    return answer


@contextmanager
def running(engines: Sequence[Engine]) -> Iterator[None]:
    """All ``engines``, loaded; they are stopped at the end, however it comes."""
    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield


def read_loaded(log_dir: Path) -> dict[str, dict[str, Any]]:
    """The "loaded" line of each model process of a run, by process name: backend, weight_bytes."""
    loaded: dict[str, dict[str, Any]] = {}
    for path in sorted(log_dir.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                fields = msgspec.json.decode(line, type=dict[str, Any])
                if fields.get("event") == "loaded":
                    keep = ("backend", "weight_bytes", "kv_blocks", "threads")
                    loaded[process_of(path)] = {k: fields[k] for k in keep if k in fields}
    return loaded
