"""What every process of a pipeline does around its own work.

``run_process`` joins the run directory, sets up logs, signals and cores, answers to the hub, runs
the body, and turns whatever happens into one line, one message to the hub and an exit status.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from structlog.typing import FilteringBoundLogger

from ipc import filesystem, probe
from ipc.channel import Transport
from ipc.rundir import RunDir
from procs.hub_link import HubLink
from procs.liveness import Pulse, StopFlag, Stopping
from ssd_pipe import logs
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import ConfigError, PeerLost, SsdPipeError
from ssd_pipe.last_words import LastWords
from ssd_pipe.members import HUB_ROLE, SUPERVISOR_VARIABLE, process_name, process_title
from ssd_pipe.prctl import end_with_parent, set_title
from ssd_pipe.threads import (
    available_cores,
    process_cores,
    thread_count,
    thread_environment,
    worker_cores,
)

DRAFT_NICENESS = 5


class Runtime:
    """One process of a run, as its body sees it.

    Attributes:
        name: process name: "frontend", "scheduler", "draft", "target-0", ...
        role: the same without the rank.
        rank: tensor-parallel rank of a target, number of a draft worker, 0 otherwise.
        config: the configuration.
        rundir: the run directory, held as long as the process lives.
        log: logger of this process.
        stopping: up when the process should leave; a descriptor for pollers.
        pulse: what ``alive`` touches.
        threads: CPU threads this process computes with.
        cores: those it could run on before it took its own.
        transport: what hot-path channels use.
        returning: it takes the place of a process that is gone, while the others go on.
        notes: what people who ask for the pipeline's state should know of this process.
        link: connection to the hub; None in the hub's own process.
        announces: whether it says on stderr that it waits for the others, and that all are ready.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        config: PipelineConfig,
        rundir: RunDir,
        log: FilteringBoundLogger,
        stopping: StopFlag,
        threads: int,
    ) -> None:
        self.role = role
        self.rank = rank
        self.name = process_name(config, role, rank)
        self.config = config
        self.rundir = rundir
        self.log = log
        self.stopping = stopping
        self.pulse = Pulse(config.run.beat_timeout)
        self.threads = threads
        self.cores = available_cores()
        self.transport: Transport = "shm"
        self.returning = False
        self.notes: dict[str, str] = {}
        self.link: HubLink | None = None
        self.announces = False

    def announce(self, text: str) -> None:
        """Say on stderr how the start goes, where nobody shows the log."""
        if self.announces:
            print(f"{self.name} of run {self.rundir.name}: {text}", file=sys.stderr, flush=True)

    def alive(self) -> None:
        """The main loop turns. Due more often than ``run.beat_timeout`` once ready."""
        self.pulse.touch()

    def ready(self, facts: dict[str, int]) -> dict[str, int]:
        """Loading is done: report ``facts``, wait for the whole group, return its facts.

        In the hub's own process it returns ``facts`` at once.

        Raises:
            PeerLost: another process failed or was not ready in time.
            Stopping: asked to stop meanwhile; ``run_process`` takes it for an orderly end.
        """
        group = facts
        if self.link is not None:
            self.log.info("ready", **facts)
            group = self.link.ready(facts, self.config.run.ready_timeout, self.notes)
        self.pulse.begin()
        self.announce("ready")
        # What was loaded stays; without this every full collection walks through it mid-round.
        gc.collect()
        gc.freeze()
        return group

    def fail(self, message: str, peer: str = "") -> None:
        """Tell the hub that this process cannot go on, and why; the caller then leaves.

        ``peer``: the process that it misses, if that is why.
        """
        if self.link is not None:
            self.link.failed(message, peer)

    def connect(self, endpoint: str) -> None:
        """Answer to the hub. Raises ResourceError if refused, PeerLost if there is none."""
        run = self.config.run
        digest = self.config.digest()
        self.link = HubLink(
            endpoint, self.name, digest, run.beat_timeout, self.pulse, self.stopping
        )
        welcome = self.link.handshake(run.ready_timeout)
        self.transport = "zmq" if welcome.transport == "zmq" else "shm"
        self.returning = welcome.returning

    def warn_of_disk(self) -> None:
        """Say so where shared memory is on a disk."""
        if warning := filesystem.disk_warning(self.config.run.shm_dir):
            self.log.warning(warning)
            self.announce(warning)

    def choose_transport(self) -> None:
        """In the hub's process: find out what works. Raises ResourceError if nothing does."""
        wanted = self.config.run.transport
        report = probe.probe_with_child(self.rundir, probe.candidates(wanted))
        self.transport = "zmq" if report.transport == "zmq" else "shm"
        self.log.info(
            "transport",
            chosen=report.transport,
            round_trip_us=report.round_trips[report.transport],
            rejected=report.rejected,
        )
        self.note_transport("transport", report)

    def note_transport(self, what: str, report: probe.ProbeReport) -> None:
        """Put a probe's outcome into ``notes``: what was chosen, and why nothing better."""
        self.notes[what] = report.transport or "none"
        for name, reason in report.rejected.items():
            self.notes[f"no {name}"] = reason


def run_process(
    role: str,
    config: PipelineConfig,
    body: Callable[[Runtime], None],
    *,
    rank: int = 0,
    hub_endpoint: str = "",
    pretty_logs: bool | None = None,
    announces: bool = False,
) -> int:
    """Run one process of a pipeline in this process's main thread; returns its exit status.

    Args:
        role: "frontend", "scheduler", "target" or "draft". The scheduler's body runs the Hub.
        config: the configuration, the same in all processes.
        body: the process's own work. It loads, calls ``ready``, and loops until ``stopping``.
        rank: tensor-parallel rank of a target, number of a draft worker.
        hub_endpoint: address of the hub; empty = the socket in the run directory.
        pretty_logs: see logs.configure.
        announces: see Runtime.

    Started by a supervisor, which says so in SSD_SUPERVISOR_PID, the process gets SIGTERM when
    the supervisor's thread that started it ends.
    """
    name = process_name(config, role, rank)
    set_title(process_title(name))
    stopping = StopFlag()
    _handle_signals(stopping)
    runtime: Runtime | None = None
    with contextlib.ExitStack() as stack:
        try:
            _die_with_supervisor(stopping)
            rundir = stack.enter_context(_join(role, config))
            folder = logs.log_folder(config.run.log_dir, rundir.name)
            run = config.run
            log = logs.configure(
                name, folder / f"{name}.jsonl", run.log_level, pretty_logs, run.log_limit
            )
            stack.callback(logs.close)
            cores = available_cores()
            threads = _take_cores(role, rank, config)
            runtime = Runtime(role, rank, config, rundir, log, stopping, threads)
            runtime.cores = cores
            runtime.announces = announces
            runtime.announce("waiting for the others")
            log.info("start", pid=os.getpid(), run=rundir.name, threads=threads)
            if role == HUB_ROLE:
                if not os.environ.get(SUPERVISOR_VARIABLE):  # else that has said so
                    runtime.warn_of_disk()
                runtime.choose_transport()
            else:
                runtime.connect(hub_endpoint or rundir.endpoint("hub"))
            body(runtime)
            if runtime.link is not None and runtime.link.lost:
                raise PeerLost(runtime.link.lost, HUB_ROLE)
        except Stopping:
            status = 0
        except Exception as error:
            status = 1
            _report(error, runtime)
        else:
            status = 0
        if runtime is not None:
            if runtime.link is not None:
                runtime.link.close()
            runtime.log.info("exit", status=status, reason=stopping.reason)
    return status


def _join(role: str, config: PipelineConfig) -> RunDir:
    run = config.run
    if run.name or role == HUB_ROLE:
        return RunDir.create_or_open(run.shm_dir, run.name)
    return RunDir.open(run.shm_dir)


def _report(error: Exception, runtime: Runtime | None) -> None:
    """One line for the user or the supervisor, one for the hub, the traceback for the log."""
    expected = isinstance(error, SsdPipeError)
    peer = error.peer if isinstance(error, PeerLost) else ""
    line = " ".join(str(error).split()) or type(error).__name__
    if not expected:
        line = f"{type(error).__name__}: {line}"
    LastWords(line, peer).say()
    if runtime is None:
        return
    runtime.log.error(line, file_only=True, exc_info=not expected)
    if expected:
        runtime.log.debug("traceback", file_only=True, exc_info=True)
    runtime.fail(line, peer)


def _handle_signals(stopping: StopFlag) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def _die_with_supervisor(stopping: StopFlag) -> None:
    supervisor = os.environ.get(SUPERVISOR_VARIABLE, "")
    if not supervisor:
        return
    if str(end_with_parent()) != supervisor:  # it died before
        stopping.set("supervisor is gone")
        stopping.check()


def _take_cores(role: str, rank: int, config: PipelineConfig) -> int:
    """Pin this process as configured; returns its thread count. Raises ConfigError."""
    # Counted before pinning: a share of the machine's cores, not of this process's own.
    threads = thread_count(config, role)
    cores = process_cores(config, role)
    os.environ.update(thread_environment(config, role))
    if cores:
        try:
            os.sched_setaffinity(0, worker_cores(config, cores, rank) if role == "draft" else cores)
        except OSError:
            section = role if role in ("target", "draft") else "run"
            there = sorted(os.sched_getaffinity(0))
            raise ConfigError(
                f"{section}.cpus", f"none of {cores} is available here, these are: {there}"
            ) from None
        if role == "draft" and cores == process_cores(config, HUB_ROLE):
            # It works all the time; whoever wakes up on its core has little to do and a target
            # that waits for it.
            os.nice(DRAFT_NICENESS)
    # Imported before, torch has read the environment already.
    torch = sys.modules.get("torch")
    if torch is not None and role in ("target", "draft"):
        torch.set_num_threads(threads)
    return threads
