"""Which processes a configuration makes, and how each of them is started."""

from __future__ import annotations

import os
import socket

from ssd_pipe.children import command_for
from ssd_pipe.config import PipelineConfig
from ssd_pipe.gateway_address import LISTENER_VARIABLE
from ssd_pipe.group import ProcessGroup
from ssd_pipe.members import SUPERVISOR_VARIABLE, process_names
from ssd_pipe.threads import thread_environment

ROLES = ("scheduler", "target", "draft", "frontend", "gateway")


def members(config: PipelineConfig) -> dict[str, tuple[str, int]]:
    """Role and rank of every process by its name, in the order they are started."""
    return {
        name: (role, rank)
        for role in ROLES
        for rank, name in enumerate(process_names(config, role))
    }


class Launcher:
    """Starts the processes of one run, as often as needed.

    Args:
        config: with the run's real name.
        listener: the gateway's listening socket, which outlives every gateway, so that its port
            stays the run's.
    """

    def __init__(self, config: PipelineConfig, listener: socket.socket | None) -> None:
        self._config = config
        self._listener = listener
        self._members = members(config)

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def start(self, group: ProcessGroup, name: str) -> None:
        """Start one process. Raises OSError if the machine cannot."""
        role, rank = self._members[name]
        run = self._config.run
        environment = {**os.environ, **thread_environment(self._config, role)}
        environment |= {"PYTHONUNBUFFERED": "1", SUPERVISOR_VARIABLE: str(os.getpid())}
        inherited = []
        if role == "gateway" and self._listener is not None:
            inherited.append(self._listener.fileno())
            environment[LISTENER_VARIABLE] = str(self._listener.fileno())
        group.start(name, command_for(role, rank, run.name, run.shm_dir), environment, inherited)
