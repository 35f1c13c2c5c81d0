"""Rounds whose branches the GPU chooses: glue pass, choice and tree are queued in one go.

The host launches the tree's steps while the GPU is busy: of a small draft all at once, since what
the last ones cost is less than to fall behind; of a large one step by step, and none when the
outcome has come. In leased rounds the GPU also publishes the tree; in others the host does, as what
was chosen comes into its sight.

Once all of a leased round's tree is queued, so is the next round's glue pass, although its outcome
is not known yet: its first kernel waits for the target's record (``models.cuda.rounds.follow``).
The host reads the same record in its own time.

A launch that waits holds up whatever is queued behind it: ``resolve`` comes before anything else
that uses the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from models.cuda.fork_hooks import ForkHooks, ForkOne, ForkRow
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepGraph, StepRow
from models.cuda.rounds.follow import Follower, Mode, Verdict
from models.cuda.tree import TreeGraph
from models.cuda.tree_inputs import TreeHome
from models.cuda.tree_runner import TreeRunner
from ssd_pipe.drafting.forked import Forked
from ssd_pipe.drafting.forks import Choice
from ssd_pipe.drafting.gpu_waits import wait_until
from ssd_pipe.drafting.graph_inputs import step_rows
from ssd_pipe.drafting.trunk import Feed, Trunk

_NO_OUTCOMES = np.empty(0, np.int64)


@dataclass(slots=True)
class GlueAhead:
    """A glue pass that was launched before its outcome was known.

    Attributes:
        number: the record that tells of it.
        forked: its tree, if the outcome is a hit.
        verdict: what it was.
    """

    number: int
    forked: Forked
    verdict: Verdict = Verdict.VOID

    @property
    def hit(self) -> bool:
        """Whether the chain that is verified now was fed, and its branches are chosen."""
        return self.verdict is Verdict.HIT

    def backup(self) -> list[int]:
        """After a miss, the token that follows its recovery token, which was fed; waits for it."""
        if self.verdict is not Verdict.MISS:
            return []
        wait_until(self.forked.arrived)
        return [int(self.forked.shown.tokens[0, 0, 0])]


class GpuForks:
    """Glue passes that choose their branches, and the trees of these.

    Args:
        width: most tokens a glue pass feeds a row.
        queued: steps of a tree that are launched before they are due.
        max_positions: most positions of a sequence.
        follower: makes the inputs of single rows, and waits for outcomes.

    Attributes:
        max_positions: the same.
    """

    def __init__(
        self,
        trees: TreeRunner,
        glue: GraphRunner,
        hooks: ForkHooks,
        width: int,
        queued: int,
        max_positions: int,
        follower: Follower,
    ) -> None:
        self._trees, self._glue, self._hooks = trees, glue, hooks
        self._width = width
        self._queued, self.max_positions = queued, max_positions
        self._follower = follower
        self._ahead: GlueAhead | None = None
        self._tree: TreeGraph | None = None  # of the pass that was armed last
        self._graph: StepGraph | None = None
        self._row: tuple[int, int, float, tuple[int, ...]] | None = None

    def forget_row(self) -> None:
        """The graphs are about to be used otherwise."""
        self._row = None

    def fork(
        self,
        feeds: Sequence[Feed],
        slots: Sequence[int],
        hashes: Sequence[int],
        number: int,
        choices: Sequence[Choice],
    ) -> Forked | None:
        """Glue pass, choice of branches and first step of the tree, all queued; None if that cannot
        be without the host.

        Args:
            slots, hashes: cache slot and prefix hash of each row.
            number: of the leased round, 0 without a lease.
            choices: how each row's branches are chosen.
        """
        if max(len(tokens) for _, _, tokens, _ in feeds) > self._width:
            return None
        firsts = [first for *_, first in feeds]
        if firsts == [0]:
            [(trunk, _, tokens, _)], [choice] = feeds, choices
            self._load_row(trunk, slots[0])
            given = Mode.GIVEN, number, len(trunk.tokens), hashes[0], 0
            serial = self._hooks.arm_one(ForkOne(*given, *choice, tokens))
        else:
            tables = [trunk.table.blocks for trunk, *_ in feeds]
            rows, blocks = len(feeds), max(map(len, tables))
            home = TreeHome(number, np.array(slots), np.array(hashes, np.uint64), _NO_OUTCOMES)
            self._tree, self._graph = self._graphs(rows, blocks)
            self._tree.prepare(home, tables, [trunk.key.temperature for trunk, *_ in feeds])
            serial = self._hooks.arm(
                [
                    ForkRow(first, rank, budget, tau, limits[len(tokens) - 1 - first])
                    for (_, _, tokens, first), (rank, budget, tau, limits) in zip(
                        feeds, choices, strict=True
                    )
                ]
            )
            self._graph.load(step_rows(feeds))
            self._row = None
        forked = self._launch(serial)
        self._extend(forked)
        return forked

    # ------------------------------------------------------------ going ahead

    @property
    def follows(self) -> bool:
        """Whether ``go_ahead`` may be called."""
        return self._follower.has_records

    def go_ahead(
        self, trunk: Trunk, slot: int, record: tuple[int, int], prefix_hash: int, choice: Choice
    ) -> None:
        """Queue the glue pass of the round after an outcome that is yet to come, of one row.

        Args:
            trunk: committed tokens before the outcome; with blocks for whatever it may be.
            slot, prefix_hash: the row's slot in the cache, and the hash of those tokens.
            record: the number of that which will tell of the outcome, and the row's place there.
            choice: how branches are chosen.
        """
        number, place = record
        self._load_row(trunk, slot)
        follow = Mode.FOLLOW, number, len(trunk.tokens), prefix_hash, place
        self._ahead = GlueAhead(
            number, self._launch(self._hooks.arm_one(ForkOne(*follow, *choice)))
        )

    @property
    def awaits(self) -> int:
        """The record that a queued glue pass waits for, or has been fed; 0 without one."""
        return self._ahead.number if self._ahead is not None else 0

    def look(self) -> None:
        """Launch the tree of the outcome that was awaited, if it is there and a hit."""
        ahead = self._ahead
        if ahead is None or ahead.forked.launched:
            return
        if self._follower.verdict(ahead.number) is Verdict.HIT:
            self._extend(ahead.forked)

    def call_off(self) -> None:
        """No outcome is awaited any more; does not wait for the GPU to hear of it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._follower.call_off(ahead.number)

    def resolve(self, number: int = 0) -> GlueAhead | None:
        """End the wait for an outcome; what became of it, if it was that of record ``number``,
        which is there. Raises ResourceError if the GPU does not answer.
        """
        ahead, self._ahead = self._ahead, None
        follower = self._follower
        if ahead is None:
            return None
        if ahead.number != number:
            follower.call_off(ahead.number)
        wait_until(lambda: follower.verdict(ahead.number) is not None)
        if ahead.number != number:
            return None
        ahead.verdict = follower.verdict(number) or Verdict.VOID
        if ahead.hit and not ahead.forked.launched:
            self._extend(ahead.forked)
        return ahead

    # ------------------------------------------------------------ trees

    def grow(
        self,
        forked: Forked,
        depth: int,
        meanwhile: Sequence[Callable[[], None]],
        interrupted: Callable[[], bool],
        behind: Callable[[], None],
    ) -> Iterator[None]:
        """Go on with a tree that was begun, up to ``depth`` tokens; yields when the glue pass is
        through, then as each depth is there.

        Left early, or ``interrupted``, it launches no further steps. ``behind`` is called when all
        of the tree is queued, what is in ``meanwhile`` after that or while the GPU is busy.
        """
        graph, todo, whole = forked.tree, list(meanwhile), False
        for step in range(-1, depth):
            while forked.launched < min(step + 1 + self._queued, depth):
                self._extend(forked)
            if forked.launched == depth and not whole:
                whole = True
                behind()
            if todo:
                todo.pop(0)()
            done = forked.arrived if step < 0 else partial(graph.ended, step)
            if not wait_until(done, interrupted):
                return
            yield

    def _load_row(self, trunk: Trunk, slot: int) -> None:
        """Have on the device what stays the same of a row's rounds."""
        blocks, key = trunk.table.blocks, trunk.key
        row = (slot, key.seed, key.temperature, tuple(blocks))
        if self._row == row:
            return
        self._tree, self._graph = self._graphs(1, len(blocks))
        home = TreeHome(0, np.array([slot]), np.zeros(1, np.uint64), _NO_OUTCOMES)
        self._tree.prepare(home, [blocks], [key.temperature])
        self._graph.load([StepRow(blocks, 0, [0], key.seed, key.temperature)])
        self._row = row

    def _graphs(self, rows: int, blocks: int) -> tuple[TreeGraph, StepGraph]:
        return self._trees.graph(rows, blocks), self._glue.graph(rows, self._width, blocks)

    def _launch(self, serial: int) -> Forked:
        """The glue pass, on what the device has."""
        if self._tree is None or self._graph is None:
            raise RuntimeError("a glue pass of no rows")
        self._graph.launch()
        box = self._hooks.box(self._graph)
        return Forked(self._tree, box.side(serial), box, serial)

    @staticmethod
    def _extend(forked: Forked) -> None:
        """Launch a tree's next part."""
        forked.tree.launch_part(forked.launched)
        forked.launched += 1
