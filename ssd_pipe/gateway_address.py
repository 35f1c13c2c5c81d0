"""Where the HTTP gateway listens, for the process that listens and for those who tell users."""

from __future__ import annotations

import errno
import os
import socket

from ipc.curve import is_exposed
from ssd_pipe.config import GatewaySection
from ssd_pipe.errors import ResourceError

BACKLOG = 1024
EVERYWHERE = {
    "0.0.0.0": (socket.AF_INET, "192.0.2.1", "127.0.0.1"),
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}
"""Hosts that mean every network: family, an address for documentation, the loopback address."""
LISTENER_VARIABLE = "SSD_GATEWAY_FD"
"""Names the descriptor of a listening socket that a gateway inherits from its supervisor."""


def listen(gateway: GatewaySection) -> socket.socket:
    """A listening TCP socket. Raises ResourceError if the address cannot be bound."""
    where = f"{gateway.host}:{gateway.port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            gateway.host, gateway.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        # create_server adds the address to the text; a failed look-up has no number of errno's.
        number = None if isinstance(error, socket.gaierror) else error.errno
        reason = os.strerror(number) if number else error.strerror or str(error)
        wrong_host = isinstance(error, socket.gaierror) or number == errno.EADDRNOTAVAIL
        field = "gateway.host" if wrong_host else "gateway.port"
        raise ResourceError(f"{field}: cannot listen on {where}: {reason}") from None


def inherit_or_listen(gateway: GatewaySection) -> socket.socket:
    """The socket a supervisor has passed on, else one of its own. Raises as ``listen``."""
    inherited = os.environ.pop(LISTENER_VARIABLE, "")
    if not inherited:
        return listen(gateway)
    try:
        return socket.socket(fileno=int(inherited))
    except (ValueError, OSError) as error:
        raise ResourceError(f"{LISTENER_VARIABLE}={inherited}: no socket: {error}") from None


def address(gateway: GatewaySection, port: int) -> str:
    """Base URL, for clients, of the gateway that listens on ``port``."""
    host = usable_host(gateway.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_public(listener: socket.socket) -> bool:
    """Whether other machines can reach a listening TCP socket."""
    host, port = listener.getsockname()[:2]
    return is_exposed(f"tcp://{host}:{port}")


def usable_endpoint(endpoint: str) -> str:
    """``endpoint`` as clients can use it, if it means every network of this machine."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host.strip("[]") not in EVERYWHERE:
        return endpoint
    host = usable_host(host.strip("[]"))
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def usable_host(host: str) -> str:
    """This machine's address towards others if ``host`` means all of them, else ``host``."""
    if host not in EVERYWHERE:
        return host
    family, outside, loopback = EVERYWHERE[host]
    # Connecting a datagram socket chooses a route and sends nothing.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((outside, 9))
        except OSError:
            return loopback
        return str(probe.getsockname()[0])
