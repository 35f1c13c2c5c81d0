"""Between every process and the hub, which the scheduler's process holds: arrival, life, end."""

from __future__ import annotations

import msgspec

# ---------------------------------------------------------------- process -> hub


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """First message of a process to the hub (the scheduler), before it loads anything.

    ``config_digest`` must equal the hub's, or the hub answers Refused.
    """

    name: str
    pid: int
    config_digest: str


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """A process finished loading. ``facts`` are role-specific numbers the hub needs.

    target: num_blocks, max_model_len, vocab_size; draft: num_blocks, vocab_size; gateway: port.
    ``notes`` are as in ProcessState.
    """

    name: str
    facts: dict[str, int] = {}
    notes: dict[str, str] = {}


class Failed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """A process cannot go on; ``message`` is one line for the user.

    ``peer``: name of the process that it misses, if that is why.
    """

    name: str
    message: str
    peer: str = ""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat, both ways."""

    name: str


PeerMessage = Hello | Ready | Failed | Beat

# ---------------------------------------------------------------- hub -> process


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The hub will not have this process; ``message`` says why."""

    message: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The hub's answer to Hello. ``transport`` ("shm" or "zmq") is what hot channels use.

    ``returning``: the group serves already, and this process takes the place of one that is gone;
    what processes agree on while they start has been agreed on.
    """

    run: str
    transport: str = "shm"
    returning: bool = False


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave now, in order. ``reason`` is logged."""

    reason: str


class GroupReady(msgspec.Struct, frozen=True, tag="group_ready"):
    """Hub to all: every process is ready."""

    facts: dict[str, int] = {}


HubMessage = Welcome | Refused | Beat | Shutdown | GroupReady

# ---------------------------------------------------------------- what the hub knows of a process


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process as last seen: state is "starting", "ready", "stopping", "dead".

    ``port``: TCP port it takes HTTP requests on, 0 if none. ``silent``: seconds since its last
    heartbeat; the hub's own is 0. ``notes``: what else there is to know, such as its device and
    the transport it uses.
    """

    name: str
    pid: int
    state: str
    detail: str = ""
    port: int = 0
    silent: float = 0.0
    notes: dict[str, str] = {}
