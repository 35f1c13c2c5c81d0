"""How the branches of a round are split among draft workers.

Every worker ranks the same outcomes, likeliest first, and takes its share: branch i of a slot
belongs to worker (i + slot) mod N. So each gets about budget / N of every row, the likeliest
branches are spread, and what does not divide evenly falls on another worker in every slot. Entry
ids of the speculation cache are these ranks, whoever holds the entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ipc.messages.draft import DraftPlan

T = TypeVar("T")


def owner(slot: int, entry: int, workers: int) -> int:
    """The worker that extends branch ``entry`` of a slot."""
    return (entry + slot) % workers


def part_entries(entries: int, workers: int) -> int:
    """Most of a slot's ``entries`` branches that one worker gets."""
    return -(-entries // workers)


@dataclass(frozen=True, slots=True)
class Share:
    """What one of ``workers`` draft workers takes of every slot's branches."""

    worker: int = 0
    workers: int = 1

    def first(self, slot: int) -> int:
        """Entry of this worker's likeliest branch."""
        return (self.worker - slot) % self.workers

    def of(self, slot: int, ranked: Sequence[T]) -> Sequence[T]:
        """This worker's part of a slot's branches, given all of them in order."""
        return ranked[self.first(slot) :: self.workers]

    def count(self, slot: int, leading: int) -> int:
        """How many of a slot's ``leading`` first branches are this worker's."""
        return len(range(self.first(slot), leading, self.workers))

    def makes(self, number: int) -> bool:
        """Whether hand-over ``number`` is this worker's."""
        return maker(number, self.workers) == self.worker

    def entry(self, slot: int, place: int) -> int:
        """Entry of this worker's branch number ``place`` (from 0)."""
        return self.first(slot) + place * self.workers

    def place(self, entry: int) -> int:
        """Number among this worker's branches of one that it owns."""
        return entry // self.workers


def with_backups(plan: DraftPlan, chains: dict[int, list[int]]) -> DraftPlan:
    """``plan`` for the workers that make no backups, once those are there.

    ``chains``: the chains that came, by slot. Their hand-over stays that of who made them.
    """
    rows = [
        msgspec.structs.replace(row, chain=chains[row.slot], backup=0) if row.backup else row
        for row in plan.rows
    ]
    return msgspec.structs.replace(plan, rows=rows)


def numbered(count: int, worker: int, workers: int) -> int:
    """Number of the ``count``-th hand-over (from 1), which also tells the worker that makes it."""
    return count * workers + worker


def maker(number: int, workers: int) -> int:
    """The worker that makes hand-over ``number``; see ``numbered``."""
    return number % workers
