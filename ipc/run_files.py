"""Where the files of a run are."""

from __future__ import annotations

import os
from pathlib import Path

from ipc import runlock
from ipc.errors import ResourceError

SOCKET_PATH_LIMIT = 107  # bytes, sockaddr_un.sun_path without its final NUL


class RunFiles:
    """The paths in a run directory, for those who hold the run (RunDir) and those who only look.

    Attributes:
        name: the run's name.
        path: the directory, absolute.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.path = path

    @property
    def config(self) -> Path:
        """``config.json``: the run's configuration as its creator wrote it."""
        return self.path / "config.json"

    @property
    def supervisor(self) -> Path:
        """Who supervises the run, if anybody does."""
        return self.path / "supervisor.json"

    @property
    def stop_request(self) -> Path:
        """Its presence asks the supervisor to end the run."""
        return self.path / "stop"

    @property
    def kept(self) -> set[Path]:
        """What outlives the processes of a run that starts again."""
        return {self.path / runlock.LOCK, self.config, self.supervisor, self.stop_request}

    def socket(self, name: str) -> Path:
        """Path of a unix socket. Raises ResourceError if it is too long to bind."""
        path = self.path / f"{name}.sock"
        if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
            raise ResourceError(f"{path}: longer than a unix socket's {SOCKET_PATH_LIMIT} bytes")
        return path

    def endpoint(self, name: str) -> str:
        """ZeroMQ address of ``socket(name)``."""
        return f"ipc://{self.socket(name)}"

    def bell(self, name: str) -> Path:
        """Path of a doorbell."""
        return self.path / f"{name}.bell"

    def segment(self, name: str) -> Path:
        """Path of a shared-memory file."""
        return self.path / f"{name}.shm"
