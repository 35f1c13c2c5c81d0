"""Starts the processes of a pipeline, waits until they are ready, watches them, ends them in order.

One thread owns the group from the first start to the last exit: children that ask the kernel to
die with their parent die with the *thread* that started them.
"""

from __future__ import annotations

import atexit
import enum
import os
import threading
import time
from pathlib import Path

import msgspec

from ipc.messages import ProcessState
from ipc.rundir import RunDir
from ssd_pipe import preflight
from ssd_pipe.children import command_for
from ssd_pipe.config import PipelineConfig
from ssd_pipe.endpoint import public_endpoint
from ssd_pipe.errors import PeerLost, SsdPipeError
from ssd_pipe.footprint import shared_bytes
from ssd_pipe.gateway_address import address, listen
from ssd_pipe.group import TURN, ProcessGroup
from ssd_pipe.logs import log_folder
from ssd_pipe.relay import Relay, Sink
from ssd_pipe.status_probe import StatusProbe
from ssd_pipe.threads import check_cpus, thread_environment

STOP_STAGES = (("gateway",), ("frontend",), ("scheduler",), ("target", "draft"))
# The gateway hears of a failure from the hub, and then tells its clients for a moment.
FAILED_STAGES = (*STOP_STAGES[1:], STOP_STAGES[0])
TELLING_WAIT = 1.0  # seconds for scheduler and frontend to tell clients what failed, and end
READY_TURN = 0.25  # seconds between looks
READY_PROBE = 0.5  # seconds between questions to a ready pipeline
FAILED_GRACE = 5.0  # most seconds between TERM and KILL after a failure
NOTE_EVERY = 15.0  # seconds between signs of life of a slow start
OWN_PAUSE = 2.0  # a turn longer than this means that the supervisor itself was stopped


class GroupState(enum.Enum):
    """Life of the group."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"
    STOPPED = "stopped"


class Supervisor:
    """A pipeline's processes as one thing that starts, is ready, and stops or fails.

    A context manager: entering starts the group and waits until it is ready, leaving stops it.

    Attributes:
        config: the configuration; after ``start`` with the run's real name.
        state: see GroupState; FAILED lasts until the next object.
        failure: which process failed and why, one line; empty while nothing has.
        endpoint: public ZeroMQ address, after ``start``.
        log_dir: folder of this run's logs, after ``start``.
    """

    def __init__(
        self, config: PipelineConfig, sink: Sink | None = None, ready_file: Path | None = None
    ) -> None:
        config.validate()
        self.config = config
        self.state = GroupState.NEW
        self.failure = ""
        self.endpoint = ""
        self.log_dir = Path()
        self._sink: Sink = sink if sink is not None else Relay(config.run.log_level)
        self._ready_file = ready_file
        self._group = ProcessGroup(self._sink)
        self._processes: tuple[ProcessState, ...] = ()
        self._stop_reason = ""
        self._hurry = False
        self._ready_or_over = threading.Event()
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        self._run_dir: RunDir | None = None

    # ------------------------------------------------------------ for the owner of the group

    def start(self) -> None:
        """Check everything that can be checked, make the run directory, start the processes.

        Raises ConfigError, ModelError or ResourceError with nothing started and nothing left.
        """
        if self.state is not GroupState.NEW:
            raise SsdPipeError("a supervisor starts once")
        check_cpus(self.config)
        sizes = preflight.check_models(self.config)
        if self.config.run.endpoint:
            preflight.check_endpoint_free(self.config.run.endpoint)
        if self.config.gateway.enabled:
            listen(self.config.gateway).close()
        run = self.config.run
        needed = shared_bytes(self.config, sizes.vocab_size, sizes.max_model_len)
        self._run_dir = RunDir.create(run.shm_dir, run.name, needed)
        try:
            self._enter(self._run_dir)
            if mismatch := preflight.tokenizer_mismatch(self.config):
                self._sink.event("warning", mismatch)
            probe = StatusProbe(self.endpoint, TURN)
        except BaseException:
            self._run_dir.close()
            raise
        self.state = GroupState.STARTING
        self._thread = threading.Thread(
            target=self._supervise, args=(probe,), name="supervisor", daemon=True
        )
        atexit.register(self.stop)
        self._thread.start()

    def wait_ready(self) -> bool:
        """True when every process is ready, False if the group was stopped before that.

        Raises PeerLost naming the process that failed, when the group is gone.
        """
        self._ready_or_over.wait()
        if self.failure:
            self._finished.wait()
            raise PeerLost(self.failure)
        return self.state is GroupState.READY

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the last process has exited; False if that took longer than ``timeout``."""
        return self._finished.wait(timeout)

    def request_stop(self, reason: str) -> None:
        """Begin an orderly end; a second call kills at once. Safe in a signal handler."""
        self._hurry = bool(self._stop_reason)
        self._stop_reason = reason
        self._group.wake()

    def stop(self, reason: str = "asked to stop") -> int:
        """End the group and return its exit status: 0, or 1 if a process had failed."""
        if self._thread is not None and not self._finished.is_set():
            if not self._stop_reason:
                self.request_stop(reason)
            self._finished.wait()
        return self.exit_status

    @property
    def exit_status(self) -> int:
        return 1 if self.failure else 0

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by process name."""
        return self._group.pids

    def __enter__(self) -> Supervisor:
        self.start()
        try:
            if not self.wait_ready():
                raise PeerLost(f"stopped before it was ready: {self._stop_reason}")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # ------------------------------------------------------------ the supervising thread

    def _enter(self, run_dir: RunDir) -> None:
        run = msgspec.structs.replace(self.config.run, name=run_dir.name)
        self.config = msgspec.structs.replace(self.config, run=run)
        self.endpoint = public_endpoint(run, run_dir)
        self.log_dir = log_folder(run.log_dir, run.name)
        self._sink.open_file(self.log_dir / "supervisor.jsonl")
        _write_atomically(run_dir.config, msgspec.json.encode(self.config))
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)

    def _supervise(self, probe: StatusProbe) -> None:
        try:
            try:
                self._start_children()
                self._watch(probe)
            except Exception as error:
                # Whatever happens here, the children must not outlive it.
                self._fail(f"supervisor: {type(error).__name__}: {error}")
            if not self.failure:
                self.state = GroupState.STOPPING
                self._sink.event("info", "stopping", reason=self._stop_reason)
            stages = FAILED_STAGES if self.failure else STOP_STAGES
            grace = self.config.run.grace
            if self.failure:
                grace = min(grace, FAILED_GRACE)
                self._group.await_exit(("scheduler", "frontend"), TELLING_WAIT, lambda: self._hurry)
            self._group.tear_down(stages, grace, lambda: self._hurry)
        finally:
            probe.close()
            self._leave()

    def _start_children(self) -> None:
        ranks = {
            "target": self.config.target.tp,
            "draft": int(self.config.speculative),
            "gateway": int(self.config.gateway.enabled),
        }
        run = self.config.run
        for role in ("scheduler", "target", "draft", "frontend", "gateway"):
            environment = {**os.environ, **thread_environment(self.config, role)}
            environment |= {"PYTHONUNBUFFERED": "1", "SSD_SUPERVISOR_PID": str(os.getpid())}
            for rank in range(ranks.get(role, 1)):
                name = f"target-{rank}" if role == "target" else role
                command = command_for(role, rank, run.name, run.shm_dir)
                self._group.start(name, command, environment)

    def _watch(self, probe: StatusProbe) -> None:
        """Until asked to stop or something has failed."""
        deadline = time.monotonic() + self.config.run.ready_timeout
        last_turn = last_note = time.monotonic()
        while not self._stop_reason and not self.failure:
            self._group.turn(TURN if self.state is GroupState.STARTING else READY_TURN)
            now = time.monotonic()
            if now - last_turn > OWN_PAUSE:
                deadline += now - last_turn
                probe.answered = now if probe.answered is not None else None
            last_turn = now
            if self._group.broken:
                self._fail(self._group.blame())
            elif reply := probe.poll(now):
                self._processes = reply.processes
                self._take(reply.processes, probe)
            elif self.state is GroupState.STARTING:
                if now - last_note > NOTE_EVERY:
                    last_note = now
                    self._sink.event("info", "still starting", waiting_for=self._slow())
                if now > deadline:
                    waited = f"{self.config.run.ready_timeout:g} s"
                    self._fail(f"{self._slow()}: not ready within {waited}")
            elif now - (probe.answered or now) > self.config.run.beat_timeout:
                self._fail(f"frontend: no answer for {self.config.run.beat_timeout:g} s")

    def _take(self, processes: tuple[ProcessState, ...], probe: StatusProbe) -> None:
        for process in processes:
            if process.state == "dead":
                self._fail(f"{process.name}: {process.detail or 'stopped answering'}")
                return
        if self.state is GroupState.STARTING and _all_ready(processes, set(self.pids)):
            self.state = GroupState.READY
            probe.interval = READY_PROBE
            self._announce()

    def _announce(self) -> None:
        facts = {"run": self.config.run.name, "endpoint": self.endpoint}
        for process in self._processes:
            if process.port:
                facts["http"] = address(self.config.gateway, process.port)
        if self._ready_file is not None:
            content = {**facts, "pids": self.pids, "log_dir": str(self.log_dir)}
            _write_atomically(self._ready_file, msgspec.json.encode(content))
        self._sink.event("info", "ready", **facts, mode=self.config.mode)
        self._ready_or_over.set()

    def _fail(self, failure: str) -> None:
        self.failure = failure
        self.state = GroupState.FAILED
        self._sink.event("error", "failed", reason=failure)

    def _slow(self) -> str:
        """Names of the processes that are not ready yet."""
        ready = {p.name for p in self._processes if p.state == "ready"}
        return ", ".join(name for name in self.pids if name not in ready)

    def _leave(self) -> None:
        self._group.close()
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)
        if self._run_dir is not None:
            self._run_dir.close()
        if not self.failure:
            self.state = GroupState.STOPPED
        self._sink.event("info", "stopped", status=self.exit_status)
        self._sink.close()
        atexit.unregister(self.stop)
        self._finished.set()
        self._ready_or_over.set()


def _all_ready(processes: tuple[ProcessState, ...], expected: set[str]) -> bool:
    return expected <= {p.name for p in processes if p.state == "ready"}


def _write_atomically(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    fresh.write_bytes(content)
    fresh.rename(path)
