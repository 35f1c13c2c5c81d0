"""ZeroMQ sockets as this project uses them: bounded, owner-only, never hanging at exit."""

from __future__ import annotations

import contextlib
import errno
import os
import socket as unix
import threading
from pathlib import Path

import zmq

from ssd_pipe.errors import ResourceError

DEFAULT_HWM = 4096  # messages
DEFAULT_MAX_BYTES = 64 << 20
_umask_lock = threading.Lock()


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's ZeroMQ context."""
    return zmq.Context.instance()


def make(
    kind: int, *, hwm: int = DEFAULT_HWM, max_bytes: int = DEFAULT_MAX_BYTES, linger_ms: int = 0
) -> zmq.Socket[bytes]:
    """A socket of ``kind`` (zmq.PUSH, ...).

    Args:
        kind: ZeroMQ socket type.
        hwm: messages queued either way before sending blocks or drops.
        max_bytes: largest incoming message; a peer that sends more is disconnected.
        linger_ms: how long ``close`` may go on delivering what is queued.
    """
    made = context().socket(kind)
    made.setsockopt(zmq.LINGER, linger_ms)
    made.setsockopt(zmq.SNDHWM, hwm)
    made.setsockopt(zmq.RCVHWM, hwm)
    made.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    return made


def bind(
    kind: int,
    endpoint: str,
    *,
    hwm: int = DEFAULT_HWM,
    max_bytes: int = DEFAULT_MAX_BYTES,
    linger_ms: int = 0,
) -> zmq.Socket[bytes]:
    """A bound socket; see ``make``. A socket file gets mode 0600.

    Raises ResourceError naming the address if it is in use or not usable.
    """
    path = ipc_path(endpoint)
    if path is not None:
        _take_over_stale(path)
    sock = make(kind, hwm=hwm, max_bytes=max_bytes, linger_ms=linger_ms)
    try:
        # The umask belongs to the whole process; it is stricter for a moment, never laxer.
        with _umask_lock:
            before = os.umask(0o177)
            try:
                sock.bind(endpoint)
            finally:
                os.umask(before)
    except zmq.ZMQError as error:
        sock.close()
        raise ResourceError(f"{endpoint}: {_reason(error)}") from None
    return sock


def connect(
    kind: int,
    endpoint: str,
    *,
    hwm: int = DEFAULT_HWM,
    max_bytes: int = DEFAULT_MAX_BYTES,
    linger_ms: int = 0,
) -> zmq.Socket[bytes]:
    """A connected socket; see ``make``. The peer may come later.

    Raises ResourceError if the address is malformed.
    """
    sock = make(kind, hwm=hwm, max_bytes=max_bytes, linger_ms=linger_ms)
    try:
        sock.connect(endpoint)
    except zmq.ZMQError as error:
        sock.close()
        raise ResourceError(f"{endpoint}: {_reason(error)}") from None
    return sock


def address(sock: zmq.Socket[bytes]) -> str:
    """Where a socket is bound, with the port the system chose."""
    return sock.getsockopt_string(zmq.LAST_ENDPOINT)


def ipc_path(endpoint: str) -> Path | None:
    """The file of an ``ipc://`` address; None for other transports and abstract addresses."""
    scheme, _, rest = endpoint.partition("://")
    return Path(rest) if scheme == "ipc" and rest and not rest.startswith("@") else None


def _take_over_stale(path: Path) -> None:
    """Remove a socket file nobody listens on: libzmq would unlink anything without a word."""
    if path.exists() and not path.is_socket():
        raise ResourceError(f"ipc://{path}: not a socket")
    probe = unix.socket(unix.AF_UNIX, unix.SOCK_STREAM)
    probe.setblocking(False)
    try:
        probe.connect(os.fsencode(path))
    except ConnectionRefusedError:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return
    except BlockingIOError:
        pass  # its backlog is full: somebody listens
    except FileNotFoundError:
        return
    except OSError as error:
        raise ResourceError(f"ipc://{path}: {error.strerror or error}") from None
    finally:
        probe.close()
    raise ResourceError(f"ipc://{path}: address in use")


def _reason(error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "address in use"
    return (error.strerror or str(error)).lower()
