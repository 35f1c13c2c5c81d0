"""Finding a running pipeline for the commands that talk to one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ssd_pipe.cli.expand import expand, option

if TYPE_CHECKING:
    from ssd_pipe.client import Client


class Place(msgspec.Struct, frozen=True):
    """Which pipeline the command line names; empty fields say nothing."""

    run: str = ""
    endpoint: str = ""
    shm_dir: str = ""
    server_key: str = ""
    client_key: str = ""

    def __bool__(self) -> bool:
        """Whether it names one."""
        return any(msgspec.structs.astuple(self))

    def connect(self, timeout: float = 30.0) -> Client:
        """A client of that pipeline, or of the only one. ``timeout`` is the client's.

        Raises ResourceError if there is none, or a key is missing or not usable.
        """
        from ssd_pipe.client import Client
        from ssd_pipe.endpoint import NoPipeline

        try:
            return Client(
                self.endpoint or None,
                self.run or None,
                timeout,
                shm_dir=self.shm_dir,
                server_key=self.server_key,
                client_key=self.client_key,
            )
        except NoPipeline as error:
            raise error.for_command_line() from None


def _text(flag: str, text: str) -> Any:
    return Annotated[str, typer.Option(flag, help=text)]


PLACE_OPTIONS = (
    option("run", _text("--run", "name of a running pipeline"), ""),
    option("endpoint", _text("--endpoint", "address of a running pipeline"), ""),
    option("shm_dir", _text("--shm-dir", "its run.shm_dir, if not /dev/shm"), ""),
    option("server_key", _text("--server-key", "its public key, or SSD_SERVER_KEY"), ""),
    option("client_key", _text("--client-key", "own secret certificate, or SSD_CLIENT_KEY"), ""),
)
place_options = expand("place", PLACE_OPTIONS, lambda values: Place(**values))
"""Gives a command the options that say which pipeline it talks to, as ``place: Place``."""
