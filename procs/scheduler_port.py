"""The frontend's side of the scheduler: requests out, tokens in."""

from __future__ import annotations

import msgspec
import zmq

from ipc import sockets
from ipc.messages.requests import FromScheduler, ToScheduler
from ipc.rundir import RunDir
from ssd_pipe.errors import PeerLost


class SchedulerPort:
    """To be made and used on one event loop; the scheduler may come later."""

    def __init__(self, rundir: RunDir) -> None:
        self._requests = sockets.make_async(zmq.PUSH, hwm=0)
        self._tokens = sockets.make_async(zmq.PULL, hwm=0)
        try:
            sockets.connect_also(self._requests, rundir.endpoint("requests"))
            sockets.connect_also(self._tokens, rundir.endpoint("tokens"))
        except BaseException:
            self.close()
            raise
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromScheduler] = msgspec.msgpack.Decoder(
            FromScheduler
        )

    def send(self, message: ToScheduler) -> None:
        """Never waits."""
        self._requests.send(self._encoder.encode(message))

    async def recv(self) -> FromScheduler:
        """The next message. Raises PeerLost if it is none."""
        data = await self._tokens.recv()
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise PeerLost(f"unreadable message from the scheduler: {error}") from None

    def close(self) -> None:
        """Drop what has not been sent or read."""
        self._tokens.close()
        self._requests.close()
