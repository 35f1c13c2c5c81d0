"""`ssd-pipe up` as a child that cannot outlive this process."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from ipc.rundir import OWNED
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import PeerLost
from ssd_pipe.prctl import end_with_parent

TAIL_LINES = 40
DRAIN_WAIT = 5.0  # seconds


def up_command(config: PipelineConfig, folder: Path) -> list[str]:
    """Write ``config`` to ``folder``; the command that starts it and writes ``ready.json`` there.

    A run without a name gets a fresh one.
    """
    name = config.run.name or f"{OWNED}{os.getpid()}-{secrets.token_hex(4)}"
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=name))
    file = folder / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    ready = folder / "ready.json"
    return [
        sys.executable,
        "-m",
        "ssd_pipe",
        "up",
        "--config",
        str(file),
        "--ready-file",
        str(ready),
    ]


def to_toml(config: PipelineConfig) -> str:
    """The configuration as the TOML file that gives it."""
    settings: dict[str, Any] = msgspec.to_builtins(config)
    for section in settings.values():
        if isinstance(section, dict):
            for name in [name for name, value in section.items() if value is None]:
                del section[name]  # TOML has no null, and None is what a missing one means
    return tomli_w.dumps(settings)


class OwnedProcess:
    """A child whose output is kept, ended with this process or by ``stop``."""

    def __init__(self, command: list[str]) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._started = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._error: OSError | None = None
        # The child gets its signal when the *thread* that started it ends: this one stays.
        self._keeper = threading.Thread(
            target=self._keep, args=(command,), name="ssd-keeper", daemon=True
        )
        self._keeper.start()
        self._started.wait()
        if self._error is not None:
            raise PeerLost(f"cannot start {command[0]}: {self._error.strerror}")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def last_words(self, timeout: float) -> tuple[str, str] | None:
        """(its last error line, its last output) once it has ended; None if it runs on."""
        if self._process is None:
            return None
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._keeper.join(DRAIN_WAIT)
        lines = list(self._lines)
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors[-1] if errors else f"exit status {status}"), "\n".join(lines)

    def stop(self, timeout: float) -> None:
        """TERM, then KILL after ``timeout`` seconds; returns when the child is gone."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._keeper.join(DRAIN_WAIT)

    def _keep(self, command: list[str]) -> None:
        owner = os.getpid()

        def die_with_owner() -> None:
            if end_with_parent() != owner:
                os._exit(1)

        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is the script's, which then stops the pipeline
                # safe beside threads: two system calls, looked up before the fork
                preexec_fn=die_with_owner,  # noqa: PLW1509
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        for line in self._process.stdout or ():
            self._lines.append(line.rstrip())
        self._process.wait()
