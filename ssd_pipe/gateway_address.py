"""Where the HTTP gateway listens, for the process that listens and for those who tell users."""

from __future__ import annotations

import os
import socket

from ssd_pipe.config import GatewaySection
from ssd_pipe.errors import ResourceError

BACKLOG = 1024
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
        raise ResourceError(f"gateway.port: cannot listen on {where}: {reason}") from None


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
    """Base URL of the gateway that listens on ``port``."""
    host = f"[{gateway.host}]" if ":" in gateway.host else gateway.host
    return f"http://{host}:{port}"
