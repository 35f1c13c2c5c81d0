"""A real frontend on a thread, between test clients and a scheduler played over real sockets."""

import contextlib
import json
import queue
import threading

import msgspec
import zmq

from ipc import sockets
from ipc.messages.hub import ProcessState
from ipc.messages.requests import (
    AbortRequest,
    AddRequest,
    FromScheduler,
    SchedulerStats,
    StatsRequest,
    TokensOut,
    ToScheduler,
)
from ipc.rundir import RunDir
from procs import frontend
from procs.liveness import StopFlag
from procs.runtime import Runtime
from ssd_pipe import logs
from ssd_pipe.config import config_from_mapping
from tests.text.vocabularies import byte_level

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if thinking %}+{% endif %}"
)
MAX_LEN = 64
TIMEOUT_MS = 10_000


def model_folder(path, template=TEMPLATE):
    """A folder the frontend can work with; no weights are ever read from it."""
    tokenizer = byte_level()
    tokenizer.backend.save(str(path / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.vocab_size + 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": MAX_LEN,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (path / "model.safetensors").write_bytes(b"")
    return path


class Peer:
    """The scheduler's end of the two sockets."""

    def __init__(self, rundir):
        self.requests = sockets.bind(zmq.PULL, rundir.endpoint("requests"))
        self.tokens = sockets.bind(zmq.PUSH, rundir.endpoint("tokens"), linger_ms=0)
        self._decoder = msgspec.msgpack.Decoder(ToScheduler)

    def recv(self):
        """The next message of the frontend."""
        if not self.requests.poll(TIMEOUT_MS):
            raise TimeoutError("the frontend sent nothing")
        return self._decoder.decode(self.requests.recv())

    def answer_question(self):
        question = self.recv()
        assert isinstance(question, StatsRequest)
        processes = [ProcessState(name="scheduler", pid=1, state="ready")]
        values = {"running": 3.0, "waiting": 2.0}
        self.send(SchedulerStats(question.token, values, processes))

    def add(self):
        message = self.recv()
        assert isinstance(message, AddRequest)
        return message

    def abort(self):
        message = self.recv()
        assert isinstance(message, AbortRequest)
        return message

    def send(self, message: FromScheduler):
        self.tokens.send(msgspec.msgpack.encode(message))

    def close(self):
        self.requests.close(0)
        self.tokens.close(0)


class Pipeline:
    """Run directory, frontend thread and scheduler peer of one test."""

    def __init__(self, tmp_path, endpoint="", template=TEMPLATE, **run):
        folder = tmp_path / "model"
        folder.mkdir()
        shm = tmp_path / "s"  # socket paths are short
        shm.mkdir()
        self.shm_dir = str(shm)
        self.config = config_from_mapping(
            {
                "mode": "ar",
                "target": {"model": str(model_folder(folder, template))},
                "run": {"shm_dir": self.shm_dir, "endpoint": endpoint} | run,
            }
        )
        self.rundir = RunDir.create(self.shm_dir, "t")
        self.rundir.config.write_bytes(msgspec.json.encode(self.config))
        self.endpoint = endpoint or self.rundir.endpoint("public")
        self.stopping = StopFlag()
        self.peer = Peer(self.rundir)
        self.error = None
        self.log = logs.configure("frontend", tmp_path / "frontend.jsonl", "info", False)
        self._thread = threading.Thread(target=self._body, daemon=True)
        self._thread.start()

    def _body(self):
        runtime = Runtime("frontend", 0, self.config, self.rundir, self.log, self.stopping, 1)
        try:
            frontend.run(runtime)
        except Exception as error:
            self.error = error

    def stop(self):
        self.stopping.set("test")
        self._thread.join(10)
        assert not self._thread.is_alive()

    def close(self):
        self.stop()
        self.peer.close()
        self.rundir.close()
        logs.close()


@contextlib.contextmanager
def pipeline(tmp_path, endpoint="", template=TEMPLATE, **run):
    made = Pipeline(tmp_path, endpoint, template, **run)
    try:
        yield made
    finally:
        made.close()
    assert made.error is None


HANG = 9
"""First token of prompts that ``Echo`` takes and never answers."""


class Echo:
    """A thread that plays the scheduler: answers each prompt with its own tokens, one a message.

    Attributes:
        added, aborted: messages seen, by arrival.
    """

    def __init__(self, peer, pid=1):
        self._pid = pid  # the scheduler's
        self.added: queue.Queue[AddRequest] = queue.Queue()
        self.aborted: queue.Queue[AbortRequest] = queue.Queue()
        self._peer = peer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._stop.is_set():
            if not self._peer.requests.poll(20):
                continue
            message = self._peer.recv()
            if isinstance(message, StatsRequest):
                processes = [ProcessState(name="scheduler", pid=self._pid, state="ready")]
                self._peer.send(SchedulerStats(message.token, {"running": 1.0}, processes))
            elif isinstance(message, AbortRequest):
                self.aborted.put(message)
            else:
                self.added.put(message)
                if message.tokens[0] != HANG:
                    self._echo(message)

    def _echo(self, request):
        answer = request.tokens[: request.max_tokens]
        for at, token in enumerate(answer, start=1):
            finish = "length" if at == len(answer) else ""
            self._peer.send(TokensOut(request.rid, [token], 0, finish))

    def close(self):
        self._stop.set()
        self._thread.join()
