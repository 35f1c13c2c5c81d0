"""Typed one-way channels between processes, over whichever transport the run uses."""

from __future__ import annotations

from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from ipc.errors import PeerLost
from ipc.rundir import RunDir
from ipc.shm_channel import DEFAULT_CAPACITY, ShmChannel
from ipc.zmq_channel import ZmqChannel

Transport = Literal["shm", "zmq"]
T = TypeVar("T")


class HasFileno(Protocol):
    """Anything with a descriptor."""

    def fileno(self) -> int: ...


class ChannelOwner(Protocol):
    """A process as channels see it: where its run lives, what it uses, when it stops."""

    @property
    def rundir(self) -> RunDir: ...

    @property
    def transport(self) -> Transport: ...

    @property
    def stopping(self) -> HasFileno: ...


class Channel(Protocol):
    """Records of bytes, one way, in order, none lost while both sides live."""

    def send(self, data: bytes | bytearray, timeout: float = ...) -> None:
        """Send one record; PeerLost if the peer has stopped reading."""

    def recv(self, timeout: float) -> bytes | None:
        """The next record; None after ``timeout`` seconds, or when the stop flag is up."""

    def fileno(self) -> int:
        """Descriptor for pollers; when readable, call ``recv(0)`` until it returns None."""

    def waiting(self) -> bool:
        """Whether a record is there; cheaper than ``recv(0)`` where none is."""

    def also_watch(self, fd: int) -> None:
        """Let ``recv`` return early, with None, when ``fd`` is readable too."""

    def close(self) -> None:
        """Close this side."""


class TypedSender(Generic[T]):
    """Encodes messages of one type (a struct, or a union of tagged structs)."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    def open(
        cls,
        owner: ChannelOwner,
        name: str,
        kind: Any,
        *,
        capacity: int = DEFAULT_CAPACITY,
        endpoint: str = "",
    ) -> TypedSender[Any]:
        """The sending side of channel ``name``.

        Args:
            owner: the process (procs.runtime.Runtime).
            name: the channel; one sender, one receiver; either may open it first.
            kind: what is sent, for the reader of the code; nothing is checked at run time.
            capacity: bytes in flight over shared memory; both sides give the same.
            endpoint: address of the receiver over ZeroMQ; empty = a socket in the run directory.

        Raises:
            ResourceError: no memory, or the other side opened it with another capacity.
        """
        if owner.transport == "shm":
            return TypedSender(ShmChannel.open(owner.rundir, name, capacity))
        return TypedSender(ZmqChannel.sender(endpoint or owner.rundir.endpoint(name)))

    def send(self, message: T, timeout: float = 10.0) -> None:
        """Raises PeerLost if the peer has stopped reading, ResourceError if it is too large."""
        self._channel.send(self._encoder.encode(message), timeout)

    def close(self) -> None:
        self._channel.close()


class TypedReceiver(Generic[T]):
    """Decodes messages of one type."""

    def __init__(self, channel: Channel, kind: Any) -> None:
        """``kind`` is the type itself; unions cannot be written as ``type[T]``."""
        self._channel = channel
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    @classmethod
    def open(
        cls,
        owner: ChannelOwner,
        name: str,
        kind: Any,
        *,
        capacity: int = DEFAULT_CAPACITY,
        endpoint: str = "",
        spin_us: int = 0,
    ) -> TypedReceiver[Any]:
        """The receiving side of channel ``name``; arguments and errors as in TypedSender.open.

        ``recv`` returns early when the owner's stop flag goes up. ``spin_us``: microseconds it
        looks before it sleeps (shared memory only).
        """
        stop_fd = owner.stopping.fileno()
        if owner.transport == "shm":
            channel = ShmChannel.open(owner.rundir, name, capacity, spin_us, stop_fd)
            return TypedReceiver(channel, kind)
        bound = ZmqChannel.receiver(endpoint or owner.rundir.endpoint(name), stop_fd)
        return TypedReceiver(bound, kind)

    def recv(self, timeout: float) -> T | None:
        """The next message; None after ``timeout`` seconds, or when the stop flag is up.

        Raises PeerLost if the record is no such message.
        """
        data = self._channel.recv(timeout)
        if data is None:
            return None
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise PeerLost(f"unreadable message from a peer: {error}") from None

    def fileno(self) -> int:
        """Descriptor for pollers; when readable, call ``recv(0)`` until it returns None."""
        return self._channel.fileno()

    def waiting(self) -> bool:
        """Whether a message is there; cheaper than ``recv(0)`` where none is."""
        return self._channel.waiting()

    def also_watch(self, fd: int) -> None:
        """Let ``recv`` return early, with None, when ``fd`` is readable too."""
        self._channel.also_watch(fd)

    def close(self) -> None:
        self._channel.close()
