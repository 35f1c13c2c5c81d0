"""The Submits that the frontend serves, and the requests each has become."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from procs.open_request import OpenRequest

Key = tuple[bytes, str]
"""Who sent a Submit (ZeroMQ identity), and what they call it."""


@dataclass(slots=True, eq=False)
class Group:
    """The requests of one Submit, one per answer wanted.

    Attributes:
        answers: how many.
        rids: those still open.
        deadline: fails them when it comes; None where there is no time limit.
    """

    answers: int
    rids: list[int] = field(default_factory=list)
    deadline: asyncio.TimerHandle | None = None


class OpenSubmits:
    """A Submit is open from when it is read until its last request has ended or it has failed."""

    def __init__(self) -> None:
        self._groups: dict[Key, Group] = {}
        self._requests: dict[int, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._groups)

    def begin(self, key: Key, answers: int) -> Group | None:
        """Open a Submit; None if the client has another one of that name."""
        if key in self._groups:
            return None
        self._groups[key] = group = Group(answers)
        return group

    def get(self, key: Key) -> Group | None:
        """An open Submit's group."""
        return self._groups.get(key)

    def of_client(self, client: bytes) -> list[Key]:
        """All that a client has open."""
        return [key for key in self._groups if key[0] == client]

    def add(self, group: Group, request: OpenRequest) -> None:
        """One of the group's requests begins."""
        group.rids.append(request.rid)
        self._requests[request.rid] = request

    def request(self, rid: int) -> OpenRequest | None:
        """An open request, None once it has ended."""
        return self._requests.get(rid)

    def requests_of(self, group: Group) -> list[OpenRequest]:
        """The group's requests that are open."""
        return [self._requests[rid] for rid in group.rids]

    def end(self, request: OpenRequest) -> None:
        """A request has ended, and with the last one its Submit."""
        del self._requests[request.rid]
        key = request.client, request.id
        group = self._groups[key]
        group.rids.remove(request.rid)
        if not group.rids:
            self._forget(key)

    def lose(self, rid: int) -> Key | None:
        """The scheduler has given a request up: the Submit to be closed for it, None if that is
        closed already."""
        request = self._requests.pop(rid, None)
        return None if request is None else (request.client, request.id)

    def close(self, key: Key) -> list[int]:
        """End an open Submit, whatever becomes of its requests; those that were open."""
        rids = self._forget(key).rids
        return [rid for rid in rids if self._requests.pop(rid, None) is not None]

    def _forget(self, key: Key) -> Group:
        group = self._groups.pop(key)
        if group.deadline is not None:
            group.deadline.cancel()
        return group
