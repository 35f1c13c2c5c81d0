"""Starts the processes of a pipeline, waits until they are ready, watches them, ends them in order.

One thread owns the group from the first start to the last exit: children that ask the kernel to
die with their parent die with the *thread* that started them. Under ``run.on_failure = "restart"``
a group that failed is ended like any other, its run directory is emptied, and it is started again
in the same place: same run, same public endpoint, same HTTP port.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ipc import filesystem
from ipc.messages.hub import ProcessState
from ipc.rundir import RunDir, list_runs
from ssd_pipe import logs, preflight, ready_file, run_control, slow_kernels
from ssd_pipe.config import PipelineConfig
from ssd_pipe.config_paths import with_absolute_paths
from ssd_pipe.endpoint import local_endpoint
from ssd_pipe.errors import PeerLost, SsdPipeError
from ssd_pipe.footprint import shared_bytes
from ssd_pipe.gateway_address import address, listen, usable_endpoint
from ssd_pipe.group import Blame, ProcessGroup
from ssd_pipe.launch import Launcher
from ssd_pipe.life import READY_TURN, Life
from ssd_pipe.members import STOP_STAGES
from ssd_pipe.relay import Relay, Sink
from ssd_pipe.restarts import RestartBudget
from ssd_pipe.threads import check_cpus

# The gateway hears of a failure from the hub, and then tells its clients for a moment.
FAILED_STAGES = (*STOP_STAGES[1:], STOP_STAGES[0])
TELLING_WAIT = 1.0  # seconds for scheduler and frontend to tell clients what failed, and end
FAILED_GRACE = 5.0  # most seconds between TERM and KILL after a failure


class GroupState(enum.Enum):
    """Life of the group."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    FAILED = "failed"
    STOPPED = "stopped"


class Supervisor:
    """A pipeline's processes as one thing that starts, is ready, and stops or fails.

    A context manager: entering starts the group and waits until it is ready, leaving stops it.

    Attributes:
        config: the configuration with absolute paths; after ``start`` with the run's real name.
        state: see GroupState; FAILED lasts until the next object, or until the group is restarted.
        failure: which process failed and why, one line; empty while nothing has, and again when
            the group is restarted.
        restarts: how often the whole group has been restarted.
        endpoint: ZeroMQ address for clients on this machine, after ``start``.
        log_dir: folder of this run's logs, after ``start``.
    """

    def __init__(
        self, config: PipelineConfig, sink: Sink | None = None, ready_file: Path | None = None
    ) -> None:
        config.validate()
        self.config = with_absolute_paths(config)
        self.state = GroupState.NEW
        self.failure = ""
        self._culprit = ""  # the process that began the failure, if a single one did
        self.restarts = 0
        self.endpoint = ""
        self.log_dir = Path()
        self._sink: Sink = sink if sink is not None else Relay(config.run.log_level)
        self._ready_file = ready_file
        self._group = ProcessGroup(self._sink)
        self._budget = RestartBudget(config.run.max_restarts, config.run.restart_window)
        self._life: Life | None = None
        self._stop_reason = ""
        self._hurry = False
        self._ready_or_over = threading.Event()
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        self._held = contextlib.ExitStack()

    # ------------------------------------------------------------ for the owner of the group

    def start(self) -> None:
        """Check everything that can be checked, make the run directory, start the processes.

        Raises ConfigError, ModelError or ResourceError with nothing started and nothing left.
        """
        if self.state is not GroupState.NEW:
            raise SsdPipeError("a supervisor starts once")
        if self._ready_file is not None:
            ready_file.check_place(self._ready_file)
        check_cpus(self.config)
        preflight.check_settings(self.config)
        sizes = preflight.check_models(self.config)
        preflight.check_endpoint(self.config.run)
        run = self.config.run
        needed = shared_bytes(self.config, sizes.vocab_size, sizes.max_model_len)
        with contextlib.ExitStack() as held:
            listener = None
            if self.config.gateway.enabled:
                listener = held.enter_context(listen(self.config.gateway))
            run_dir = held.enter_context(RunDir.create(run.shm_dir, run.name, needed))
            self._enter(run_dir)
            warnings = (
                preflight.tokenizer_mismatch(self.config),
                filesystem.disk_warning(run.shm_dir),
            )
            for warning in filter(None, warnings):
                self._sink.event("warning", warning)
            self._held = held.pop_all()
        self.state = GroupState.STARTING
        launcher = Launcher(self.config, listener)
        self._thread = threading.Thread(
            target=self._supervise, args=(launcher, run_dir), name="supervisor", daemon=True
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
        """End the group and return its exit status: 0, or 1 if it ended because of a failure."""
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
        run_control.announce(run_dir)  # before anything else: it can be asked to end from now on
        run = msgspec.structs.replace(self.config.run, name=run_dir.name)
        self.config = msgspec.structs.replace(self.config, run=run)
        self.endpoint = local_endpoint(run_dir)
        self.log_dir = logs.log_folder(run.log_dir, run.name)
        logs.expire(self.log_dir.parent, list_runs(run.shm_dir))
        self._sink.open_file(self.log_dir / "supervisor.jsonl", run.log_limit)
        ready_file.write_atomically(run_dir.config, msgspec.json.encode(self.config))
        self._run_files = run_dir
        self._remove_ready_file()

    def _stopping(self) -> bool:
        """Whether the owner, or somebody else in the run directory, has asked for the end."""
        if not self._stop_reason and run_control.stop_requested(self._run_files):
            self.request_stop(run_control.STOP_REASON)
        return bool(self._stop_reason)

    def _supervise(self, launcher: Launcher, run_dir: RunDir) -> None:
        try:
            try:
                self._live(launcher)
                while self.failure and self._make_room(run_dir):
                    self._live(launcher)
            except Exception as error:
                # Whatever happens here, the children must not outlive it.
                self._fail(Blame("", f"supervisor: {type(error).__name__}: {error}"))
            if not self.failure:
                self.state = GroupState.STOPPING
                self._sink.event("info", "stopping", reason=self._stop_reason)
            self._end_processes()
        finally:
            self._leave()

    def _live(self, launcher: Launcher) -> None:
        """One life of the group, until it is asked to stop or has failed."""
        self.state = GroupState.STARTING
        life = Life(self.config, self._group, launcher, self._sink, self.endpoint, self._stopping)
        with life:
            self._life = life
            if life.begin():
                self._announce(life.processes)
                life.serve()
        if life.blame:
            self._fail(life.blame)

    def _announce(self, processes: tuple[ProcessState, ...]) -> None:
        self.state = GroupState.READY
        run = self.config.run
        facts = {"run": run.name, "endpoint": usable_endpoint(run.endpoint) or self.endpoint}
        for process in processes:
            if process.port:
                facts["http"] = address(self.config.gateway, process.port)
        if self._ready_file is not None:
            content = {**facts, "pids": self.pids, "log_dir": str(self.log_dir)}
            ready_file.write(self._ready_file, content, self._sink, again=self.restarts > 0)
        for warning, names in slow_kernels.warnings(processes):
            self._sink.event("warning", warning, processes=names)
        self._sink.event("info", "ready", **facts, mode=self.config.mode)
        self._ready_or_over.set()

    def _fail(self, blame: Blame) -> None:
        self._culprit, self.failure = blame
        self.state = GroupState.FAILED
        self._sink.event("error", "failed", reason=self.failure)

    def _make_room(self, run_dir: RunDir) -> bool:
        """After a failure: make room for another life of the group; False if there will be none."""
        was_ready = self._ready_or_over.is_set()
        if self.config.run.on_failure != "restart" or not was_ready or self._stopping():
            return False
        wait = self._budget.take(self._life.served if self._life is not None else 0.0)
        if wait is None:
            self.failure += f" (given up, restarts in a row: {self._budget.spent})"
            return False
        self.state = GroupState.RESTARTING
        self._sink.event("warning", "restarting", reason=self.failure, seconds=wait)
        self._remove_ready_file()
        self._end_processes()
        # A process that cannot be killed still holds what its successor would need.
        if not self._group.clear():
            return False
        run_dir.wipe()
        self.failure = ""
        until = time.monotonic() + wait
        while not self._stopping() and (left := until - time.monotonic()) > 0:
            self._group.turn(min(left, READY_TURN))
        self.restarts += not self._stop_reason
        return not self._stop_reason

    def _end_processes(self) -> None:
        stages: Sequence[Sequence[str]] = STOP_STAGES
        grace = self.config.run.grace
        if self.failure:
            stages, grace = FAILED_STAGES, min(grace, FAILED_GRACE)
            self._group.await_exit(("scheduler", "frontend"), TELLING_WAIT, lambda: self._hurry)
            # Who is missed and still there hangs; the others are on their way out.
            self._group.kill(self._culprit)
        self._group.tear_down(stages, grace, lambda: self._hurry)

    def _remove_ready_file(self) -> None:
        if self._ready_file is not None:
            ready_file.remove(self._ready_file, self._sink)

    def _leave(self) -> None:
        self._group.close()
        self._remove_ready_file()
        self._held.close()
        if not self.failure:
            self.state = GroupState.STOPPED
        self._sink.event("info", "stopped", status=self.exit_status)
        self._sink.close()
        atexit.unregister(self.stop)
        self._finished.set()
        self._ready_or_over.set()
