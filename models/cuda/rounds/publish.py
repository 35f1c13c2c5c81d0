"""The draft's part: the branches of a round and, pass by pass, their tokens, into the cache."""
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from models.cuda.device import launch_options, release
from models.cuda.overlap import after_previous
from models.cuda.rounds.constants import DEPTHS, HEAD
from models.cuda.rounds.tables import RoundTables

if TYPE_CHECKING:
    from models.cuda.tree import TreeGraph


@triton.jit
def _keys_kernel(
    numbers,
    homes,
    hashes,
    outcomes,
    table,
    ENTRIES: tl.constexpr,
    ENTRIES_P: tl.constexpr,
    TABLE: tl.constexpr,
    DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + row)
    if number > 0:
        base = table + tl.load(homes + row) * TABLE
        i = tl.arange(0, ENTRIES_P)
        inside = i < ENTRIES
        outcome = tl.load(outcomes + row * ENTRIES + i, mask=inside)
        tl.store(base, -1)
        release(DEVICE)
        tl.store(base + 1, tl.load(hashes + row))
        tl.store(base + HEAD + i, outcome, mask=inside)
        release(DEVICE)
        tl.store(base, number * DEPTHS)


@triton.jit
def _depth_kernel(
    numbers,
    homes,
    chosen,
    table,
    depth,
    ENTRIES: tl.constexpr,
    ENTRIES_P: tl.constexpr,
    TABLE: tl.constexpr,
    DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + row)
    if number > 0:
        base = table + tl.load(homes + row) * TABLE
        i = tl.arange(0, ENTRIES_P)
        inside = i < ENTRIES
        token = tl.load(chosen + row * ENTRIES + i, mask=inside)
        tl.store(base + HEAD + depth * ENTRIES + i, token, mask=inside)
        release(DEVICE)
        tl.store(base, number * DEPTHS + depth)


def publish_keys(
    tables: RoundTables,
    numbers: torch.Tensor,
    homes: torch.Tensor,
    hashes: torch.Tensor,
    outcomes: torch.Tensor,
) -> None:
    """Begin a round's branches: int64 [R] round numbers (0 = not in a lease), slots and prefix
    hashes, int64 [R, E] outcomes."""
    _keys_kernel[(numbers.shape[0],)](
        numbers,
        homes,
        hashes,
        outcomes,
        tables.table,
        **tables.cache_shape,
        num_warps=1,
        **launch_options(numbers),
    )


def publish_depth(
    tables: RoundTables,
    numbers: torch.Tensor,
    homes: torch.Tensor,
    chosen: torch.Tensor,
    depth: int,
) -> None:
    """Publish token ``depth`` (from 1) of every branch, int64 [R, E]."""
    _depth_kernel[(numbers.shape[0],)](
        numbers,
        homes,
        chosen,
        tables.table,
        depth,
        **tables.cache_shape,
        num_warps=1,
        **launch_options(numbers),
    )


class TreePublisher:
    """``TreeHooks`` that write leased branches to the cache."""

    def __init__(self, tables: RoundTables) -> None:
        self._tables = tables

    def begin(self, graph: TreeGraph) -> None:
        inputs = graph.inputs
        publish_keys(self._tables, *(inputs[n] for n in ("numbers", "homes", "hashes", "outcomes")))

    def step(self, graph: TreeGraph, step: int) -> None:
        numbers, homes = graph.inputs["numbers"], graph.inputs["homes"]
        publish_depth(self._tables, numbers, homes, graph.chosen[step], step + 1)
