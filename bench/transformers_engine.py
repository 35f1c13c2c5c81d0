"""transformers' ``generate``, plain or assisted, in a process with its own threads and cores."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.engines import Answer, Facts
from bench.transformers_worker import Job, Loaded, Output
from ssd_pipe.errors import PeerLost
from ssd_pipe.params import SamplingParams
from ssd_pipe.threads import THREAD_VARIABLES

DEADLINE = 600.0  # seconds one answer, or loading, may take


class TransformersEngine:
    """``model.generate`` of transformers, KV cache on.

    Args:
        model: folder of the target.
        assistant: folder of the draft for assisted generation; None = plain.
        threads: intra-op threads of torch.
        cpus: cores the process is kept on; empty = all.
        device, dtype: of both models.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        assistant: Path | None = None,
        threads: int = 1,
        cpus: Sequence[int] = (),
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        self.name = name
        self.facts = Facts()
        self._model = model
        self._assistant = assistant
        self._threads = threads
        self._cpus = list(cpus)
        self._device = device
        self._dtype = dtype
        self._process: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._rest = b""

    def start(self) -> None:
        command = [sys.executable, "-m", "bench.transformers_worker", "--model", str(self._model)]
        command += ["--threads", str(self._threads)]
        command += ["--device", self._device, "--dtype", self._dtype]
        if self._assistant is not None:
            command += ["--assistant", str(self._assistant)]
        if self._cpus:
            command += ["--cpus", ",".join(map(str, self._cpus))]
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(self._threads))}
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # Ctrl-C is the parent's business; the end of its pipe ends the child
        )
        self._selector.register(self._process.stdout or 0, selectors.EVENT_READ)

    def wait_ready(self) -> None:
        loaded = self._receive(Loaded)
        self.facts = Facts(
            weight_bytes=loaded.weight_bytes,
            settings={
                "engine": "transformers",
                "assistant": None if self._assistant is None else str(self._assistant),
                "model": str(self._model),
                "threads": self._threads,
                "cpus": self._cpus,
                **loaded.settings,
            },
        )

    def generate(self, tokens: Sequence[int], params: SamplingParams) -> Answer:
        return self.run(Job(tokens=list(tokens), params=params)).answer

    def run(self, job: Job) -> Output:
        """One job, with everything the worker knows about it. Raises PeerLost."""
        process = self._running()
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")  # type: ignore[union-attr]
        except BrokenPipeError:
            raise self._lost() from None
        return self._receive(Output)

    def counters(self) -> dict[str, float]:
        return {}

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._selector.close()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _receive(self, kind: type[Any]) -> Any:
        process, waited = self._running(), 0.0
        pieces: deque[bytes] = deque([self._rest])
        while b"\n" not in pieces[-1]:
            if not self._selector.select(5.0):
                waited += 5.0
                if waited >= DEADLINE:
                    raise PeerLost(f"{self.name}: no answer within {DEADLINE:g} s")
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)  # type: ignore[union-attr]
            if not data:
                raise self._lost()
            pieces.append(data)
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        return msgspec.json.decode(line, type=kind)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise PeerLost(f"{self.name} is not running")
        return self._process

    def _lost(self) -> PeerLost:
        status = self._running().wait()
        return PeerLost(f"{self.name}: the transformers process ended with status {status}")
