"""Rounds of leases on the draft's GPU: glue pass, choice of branches and tree without the host.

Once all of a tree is queued, so is the next round's glue pass, although its outcome is not known
yet: its first kernel waits for the target's record (``models.cuda.rounds.follow``). The host reads
the same record in its own time, and launches the tree's steps while the GPU is busy: of a small
draft all at once, since what the last ones cost is less than to fall behind; of a large one step by
step, and none when the outcome has come.

A launch that waits holds up whatever is queued behind it: ``resolve`` comes before anything else
that uses the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from models.cuda.fork import ForkAhead, ForkHooks, ForkRow
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepRow
from models.cuda.rounds.follow import Follower, Verdict
from models.cuda.staging import Readback
from models.cuda.tree_inputs import LeasedTree
from models.cuda.tree_runner import TreeRunner
from ssd_pipe.drafting.forked import Forked
from ssd_pipe.drafting.gpu_waits import wait_until
from ssd_pipe.drafting.graph_inputs import step_rows
from ssd_pipe.drafting.trunk import Feed, Trunk

_NO_OUTCOMES = np.empty(0, np.int64)


@dataclass(slots=True)
class Ahead:
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
        self.forked.arrived.wait()
        return [int(self.forked.tokens[0, 0, 0])]


class LeasedForks:
    """Glue passes that choose their branches, and the trees of these.

    Args:
        width: most tokens a glue pass feeds a row.
        steps: K.
        queued: steps of a tree that are launched before they are due.
        max_positions: most positions of a sequence.
        follower: waits for outcomes, None where nobody does.

    Attributes:
        max_positions: the same.
    """

    def __init__(
        self,
        trees: TreeRunner,
        glue: GraphRunner,
        hooks: ForkHooks,
        readback: Readback,
        width: int,
        steps: int,
        queued: int,
        max_positions: int,
        follower: Follower | None,
    ) -> None:
        self._trees, self._glue, self._hooks = trees, glue, hooks
        self._readback, self._width, self._steps = readback, width, steps
        self._queued, self.max_positions = queued, max_positions
        self._follower = follower
        self._forks = 0
        self._ahead: Ahead | None = None
        self._row: Any = None  # graphs and row whose fixed inputs are on the device

    def forget_row(self) -> None:
        """The graphs are about to be used otherwise."""
        self._row = None

    def fork(
        self,
        feeds: Sequence[Feed],
        slots: Sequence[int],
        hashes: Sequence[int],
        number: int,
        choices: Sequence[tuple[int, int, float, list[int]]],
    ) -> Forked | None:
        """Glue pass, choice of branches and first step of the tree of leased round ``number``, all
        queued; None if that cannot be without the host.

        Args:
            slots, hashes: cache slot and prefix hash of each row.
            choices: how each row's branches are chosen, the fields of a ForkRow.
        """
        if max(len(tokens) for _, _, tokens, _ in feeds) > self._width:
            return None
        tables = [trunk.table.blocks for trunk, *_ in feeds]
        blocks = max(map(len, tables))
        tree = self._trees.graph(len(feeds), blocks)
        glue = self._glue.graph(len(feeds), self._width, blocks)
        lease = LeasedTree(number, np.array(slots), np.array(hashes, np.uint64), _NO_OUTCOMES)
        tree.prepare(lease, tables, [trunk.key.temperature for trunk, *_ in feeds])
        self._hooks.arm([ForkRow(*choice) for choice in choices])
        glue.load(step_rows(feeds))
        self._row = None
        forked = self._launch(len(feeds), blocks)
        self._extend(forked)
        return forked

    # ------------------------------------------------------------ going ahead

    @property
    def follows(self) -> bool:
        """Whether ``go_ahead`` may be called."""
        return self._follower is not None

    def go_ahead(
        self,
        trunk: Trunk,
        slot: int,
        number: int,
        prefix_hash: int,
        choice: tuple[int, float, list[list[int]]],
    ) -> None:
        """Queue the glue pass of the round after an outcome that is yet to come, of one row.

        Args:
            trunk: committed tokens before the outcome; with blocks for whatever it may be.
            slot, prefix_hash: the row's slot in the cache, and the hash of those tokens.
            number: the record that will tell of the outcome.
            choice: how branches are chosen: budget, temperature and limits of a ForkAhead.
        """
        blocks = trunk.table.blocks
        tree = self._trees.graph(1, len(blocks))
        glue = self._glue.graph(1, self._width, len(blocks))
        row = (tree, glue, slot, trunk.key.seed, trunk.key.temperature, tuple(blocks))
        if self._row != row:
            lease = LeasedTree(0, np.array([slot]), np.zeros(1, np.uint64), _NO_OUTCOMES)
            tree.prepare(lease, [blocks], [trunk.key.temperature])
            glue.load([StepRow(blocks, 0, [0], trunk.key.seed, trunk.key.temperature)])
            self._row = row
        self._hooks.arm_ahead(ForkAhead(number, len(trunk.tokens), prefix_hash, *choice))
        self._ahead = Ahead(number, self._launch(1, len(blocks)))

    def look(self) -> None:
        """Launch the tree of the outcome that was awaited, if it is there and a hit."""
        ahead = self._ahead
        if ahead is None or self._follower is None or ahead.forked.launched:
            return
        if self._follower.verdict(ahead.number) is Verdict.HIT:
            self._extend(ahead.forked)

    def resolve(self, number: int = 0) -> Ahead | None:
        """End the wait for an outcome; what became of it, if it was that of record ``number``,
        which is there. Raises ResourceError if the GPU does not answer.
        """
        ahead, self._ahead = self._ahead, None
        follower = self._follower
        if ahead is None or follower is None:
            return None
        if ahead.number != number:
            follower.call_off(ahead.number)
        wait_until(lambda: follower.verdict(ahead.number) is not None)
        ahead.verdict = follower.verdict(ahead.number) or Verdict.VOID
        if ahead.number != number:
            return None
        if ahead.verdict is Verdict.HIT and not ahead.forked.launched:
            self._extend(ahead.forked)
        return ahead

    # ------------------------------------------------------------ trees

    def grow(
        self,
        forked: Forked,
        meanwhile: Sequence[Callable[[], None]],
        interrupted: Callable[[], bool],
        behind: Callable[[], None],
    ) -> Iterator[None]:
        """Go on with a tree that was begun; yields when the glue pass is through, then as each
        depth is there.

        Left early, or ``interrupted``, it launches no further steps. ``behind`` is called when all
        of the tree is queued, what is in ``meanwhile`` after that or while the GPU is busy.
        """
        graph, todo, whole = forked.tree, list(meanwhile), False
        for step in range(-1, self._steps):
            while forked.launched < min(step + 1 + self._queued, graph.launches):
                self._extend(forked)
            if forked.launched == graph.launches and not whole:
                whole = True
                behind()
            if todo:
                todo.pop(0)()
            done = forked.arrived.passed if step < 0 else partial(graph.ended, step)
            if not wait_until(done, interrupted):
                return
            yield

    def _launch(self, rows: int, blocks: int) -> Forked:
        """The glue pass, on what the device has."""
        out = self._glue.graph(rows, self._width, blocks).launch()
        if out.top_tokens is None or out.top_scores is None or out.next_scores is None:
            raise RuntimeError("the glue graph keeps no candidates")
        self._forks += 1
        side = self._forks % 2  # the last round's may not have been studied yet
        return Forked(
            self._trees.graph(rows, blocks),
            self._readback.fetch(f"tokens-{side}", out.top_tokens),
            self._readback.fetch(f"scores-{side}", out.top_scores),
            self._readback.fetch(f"own-{side}", out.next_scores),
            self._readback.mark(),
        )

    @staticmethod
    def _extend(forked: Forked) -> None:
        """Launch a tree's next part."""
        forked.tree.launch_part(forked.launched)
        forked.launched += 1
