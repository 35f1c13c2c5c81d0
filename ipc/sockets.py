"""ZeroMQ sockets as this project uses them: bounded, private, never hanging at exit.

A socket file is for its owner alone; tcp that other machines reach has CURVE keys or is refused.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket as unix
import threading
from functools import cache
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from ipc import curve
from ipc.curve import ClientKeys, KeyPair
from ipc.errors import ResourceError

DEFAULT_HWM = 4096  # messages
DEFAULT_MAX_BYTES = 64 << 20
_umask_lock = threading.Lock()
_monitors = itertools.count(1)


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's ZeroMQ context."""
    return zmq.Context.instance()


def make(
    kind: int,
    *,
    hwm: int = DEFAULT_HWM,
    max_bytes: int = DEFAULT_MAX_BYTES,
    linger_ms: int = 0,
    within: zmq.Context[zmq.Socket[bytes]] | None = None,
) -> zmq.Socket[bytes]:
    """A socket of ``kind`` (zmq.PUSH, ...).

    Args:
        kind: ZeroMQ socket type.
        hwm: messages queued either way before sending blocks or drops.
        max_bytes: largest incoming message; a peer that sends more is disconnected.
        linger_ms: how long delivery of what is queued may go on after ``close``, which does not
            wait for it, no more than the process's exit does: ``within.term()`` does.
        within: another context than this process's.
    """
    made = (within or context()).socket(kind)
    _bound(made, hwm, max_bytes, linger_ms)
    return made


def make_async(
    kind: int, *, hwm: int = DEFAULT_HWM, max_bytes: int = DEFAULT_MAX_BYTES, linger_ms: int = 0
) -> zmq.asyncio.Socket:
    """The same for asyncio.

    Not a plain socket wrapped by ``zmq.asyncio.Socket.from_socket``: closing the wrapper leaves the
    plain one with a handle that libzmq gives to the next socket, which its own end then closes.
    """
    made = _async_context().socket(kind)
    _bound(made, hwm, max_bytes, linger_ms)
    return made


def watch(sock: zmq.Socket[Any], events: int) -> zmq.Socket[bytes]:
    """A socket that tells ``events`` (zmq.EVENT_...) of ``sock``; end it with ``unwatch``."""
    teller = context().socket(zmq.PAIR)
    teller.connect(_monitored(sock, events))
    return teller


def watch_async(sock: zmq.Socket[Any], events: int) -> zmq.asyncio.Socket:
    """The same for asyncio."""
    teller = _async_context().socket(zmq.PAIR)
    teller.connect(_monitored(sock, events))
    return teller


def unwatch(sock: zmq.Socket[Any], teller: zmq.Socket[Any]) -> None:
    """Stop telling, and close the socket that tells."""
    sock.disable_monitor()
    teller.close(0)


def bind(
    kind: int,
    endpoint: str,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    linger_ms: int = 0,
    pair: KeyPair | None = None,
    within: zmq.Context[zmq.Socket[bytes]] | None = None,
) -> zmq.Socket[bytes]:
    """A bound socket; see ``make`` and ``bind_also``."""
    sock = make(kind, max_bytes=max_bytes, linger_ms=linger_ms, within=within)
    try:
        bind_also(sock, endpoint, pair)
    except ResourceError:
        sock.close()
        raise
    return sock


def bind_also(
    sock: zmq.Socket[Any], endpoint: str, pair: KeyPair | None = None, known_only: bool = False
) -> None:
    """Bind to one more address. A socket file gets mode 0600.

    Args:
        sock: the socket.
        endpoint: the address.
        pair: CURVE keys; from then on only clients with keys enter at new addresses of ``sock``.
        known_only: those that an authenticator knows (``curve.KnownClients``).

    Raises:
        ResourceError: the address is in use or not usable, or other machines reach it and there
            are no keys.
    """
    if pair is not None:
        curve.serve(sock, pair, known_only)
    elif curve.is_exposed(endpoint):
        raise ResourceError(f"{endpoint}: other machines reach it, and there are no CURVE keys")
    path = ipc_path(endpoint)
    if path is not None:
        _take_over_stale(path)
    try:
        # The umask belongs to the whole process; it is stricter for a moment, never laxer.
        with _umask_lock:
            before = os.umask(0o177)
            try:
                sock.bind(endpoint)
            finally:
                os.umask(before)
    except zmq.ZMQError as error:
        raise ResourceError(f"{endpoint}: {_reason(error)}") from None


def connect(
    kind: int,
    endpoint: str,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    linger_ms: int = 0,
    keys: ClientKeys | None = None,
) -> zmq.Socket[bytes]:
    """A connected socket; see ``make`` and ``connect_also``."""
    sock = make(kind, max_bytes=max_bytes, linger_ms=linger_ms)
    try:
        connect_also(sock, endpoint, keys)
    except ResourceError:
        sock.close()
        raise
    return sock


def connect_also(sock: zmq.Socket[Any], endpoint: str, keys: ClientKeys | None = None) -> None:
    """Connect to one more address, with CURVE keys if there are any. The peer may come later.

    Raises ResourceError if the address is malformed, or on another machine and there are no keys.
    """
    if keys is not None:
        curve.join(sock, keys)
    elif curve.is_exposed(endpoint):
        raise ResourceError(f"{endpoint}: on another machine, and there are no CURVE keys")
    try:
        sock.connect(endpoint)
    except zmq.ZMQError as error:
        raise ResourceError(f"{endpoint}: {_reason(error)}") from None


def address(sock: zmq.Socket[bytes]) -> str:
    """Where a socket is bound, with the port the system chose."""
    return sock.getsockopt_string(zmq.LAST_ENDPOINT)


@cache
def _async_context() -> zmq.asyncio.Context:
    return zmq.asyncio.Context.shadow(context().underlying)


def _bound(sock: zmq.Socket[Any], hwm: int, max_bytes: int, linger_ms: int) -> None:
    sock.setsockopt(zmq.LINGER, linger_ms)
    sock.setsockopt(zmq.SNDHWM, hwm)
    sock.setsockopt(zmq.RCVHWM, hwm)
    sock.setsockopt(zmq.MAXMSGSIZE, max_bytes)


def _monitored(sock: zmq.Socket[Any], events: int) -> str:
    address = f"inproc://monitor-{next(_monitors)}"
    sock.monitor(address, events)
    return address


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
