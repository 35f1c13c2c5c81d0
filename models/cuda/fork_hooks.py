"""What a glue graph does besides its pass: its input before, the choice of branches behind.

The host arms a launch with how branches are to be chosen (``fork``) and, for one row, with what to
feed (``rounds.follow``); the branches and what they were chosen from are shown in pinned memory
(``candidate_box``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from models.cuda.candidate_box import CandidateBox
from models.cuda.fork import choose_branches
from models.cuda.graphs import StepGraph
from models.cuda.rounds.follow import WANTED_WORDS, Fed, Follower, Mode
from models.cuda.staging import Field, Staging
from models.cuda.tree import TreeGraph


@dataclass(slots=True)
class ForkRow:
    """What the choice of one row's branches needs besides the glue pass.

    Attributes:
        first: index among the tokens fed of the one before the chain.
        rank: that of the first branch that is this worker's.
        budget: most branches, of all workers together.
        temperature: of the softmax over scores.
        limits: most branches at each accepted length 0..K.
    """

    first: int
    rank: int
    budget: int
    temperature: float
    limits: Sequence[int]


@dataclass(slots=True)
class ForkOne:
    """The input of a glue pass of one row, and the choice of its branches.

    Attributes:
        mode: where the input comes from; with number, length and prefix_hash as it says.
        place: the row's among those of the records.
        rank, budget, temperature: as in ForkRow; the row's first place is the first token fed.
        limits: a ForkRow's, for a chain of 0, 1, ..., K tokens.
        tokens: those to feed, if they are given.
    """

    mode: Mode
    number: int
    length: int
    prefix_hash: int
    place: int
    rank: int
    budget: int
    temperature: float
    limits: Sequence[Sequence[int]]
    tokens: Sequence[int] = ()


class ForkHooks:
    """``StepHooks`` of the glue graphs: the tail fills in the tree's first tokens, and shows them
    and what they were chosen from; the head of those of one row makes the input, if armed for that.

    Every arming has a number, the next one from 1 on.

    Args:
        tree_of: the tree graph for a glue graph of as many rows and blocks; it must exist.
        scratch_start: see ``GraphedDraft``.
        follower: makes the inputs.
        workers: draft workers that share the branches.
    """

    def __init__(
        self,
        max_rows: int,
        width: int,
        device: torch.device,
        scratch_start: int,
        tree_of: Callable[[int, int], TreeGraph],
        follower: Follower,
        workers: int = 1,
    ) -> None:
        self._tree_of, self._scratch_start, self._workers = tree_of, scratch_start, workers
        self._follower = follower
        self._armed = False
        self._serial = 0
        self._boxes: dict[tuple[int, int], CandidateBox] = {}
        self._staging = Staging(
            [
                Field("firsts", (max_rows,), torch.int64),
                Field("ranks", (max_rows,), torch.int32),
                Field("budgets", (max_rows,), torch.int32),
                Field("temperatures", (max_rows,), torch.float32),
                Field("limits", (max_rows, width), torch.int32),
                Field("serial", (1,), torch.int64),
                Field("wanted", (WANTED_WORDS,), torch.int64),
                Field("given", (width,), torch.int64),
                Field("options", (width, width), torch.int32),
            ],
            device,
        )

    def arm(self, rows: Sequence[ForkRow]) -> int:
        """Queue what the next launch of a glue graph needs to choose branches; its number."""
        host = self._cleared()
        for i, row in enumerate(rows):
            host["firsts"][i] = row.first
            host["ranks"][i] = row.rank
            host["budgets"][i] = row.budget
            host["temperatures"][i] = row.temperature
            host["limits"][i, : len(row.limits)] = row.limits
        return self._arm(host)

    def arm_one(self, row: ForkOne) -> int:
        """Queue the same for a glue graph of one row, and what it needs to make its input."""
        host = self._cleared()
        host["firsts"][0] = 0
        host["ranks"][0] = row.rank
        host["budgets"][0] = row.budget
        host["temperatures"][0] = row.temperature
        for length, limits in enumerate(row.limits):
            host["options"][length, : len(limits)] = limits
        host["given"].fill(-1)
        host["given"][: len(row.tokens)] = row.tokens
        host["wanted"][:3] = row.mode, row.number, row.length
        host["wanted"].view(np.uint64)[3] = row.prefix_hash
        host["wanted"][4] = row.place
        return self._arm(host)

    def disarm(self) -> None:
        """Glue passes leave the tree alone from now on."""
        if self._armed:
            self._cleared()["serial"][0] = 0
            self._staging.copy()
            self._armed = False

    def box(self, graph: StepGraph) -> CandidateBox:
        """Where the candidates of a glue graph's armed launches are shown."""
        return self._boxes[graph.rows, graph.num_blocks]

    def _cleared(self) -> dict[str, np.ndarray]:
        self._staging.wait()
        host = self._staging.host
        host["budgets"].fill(0)
        host["wanted"].fill(0)
        return host

    def _arm(self, host: dict[str, np.ndarray]) -> int:
        self._serial += 1
        host["serial"][0] = self._serial
        self._staging.copy()
        self._armed = True
        return self._serial

    def head(self, graph: StepGraph) -> None:
        if graph.rows > 1:
            return
        inputs, own = graph.inputs, self._staging.tensors
        tree = self._tree_of(graph.rows, graph.num_blocks).inputs
        fed = Fed(
            inputs["tokens"],
            inputs["starts"],
            inputs["counts"],
            own["budgets"],
            own["limits"],
            tree["numbers"],
            tree["hashes"],
        )
        self._follower.feed(own["wanted"], own["given"], own["options"], fed)

    def tail(self, graph: StepGraph) -> None:
        out, own = graph.output, self._staging.tensors
        if out.top_scores is None or out.top_tokens is None or out.next_scores is None:
            raise RuntimeError("the glue graph keeps no candidates")
        n = out.top_scores.shape[-1]
        tree = self._tree_of(graph.rows, graph.num_blocks)
        choose_branches(graph, tree, own, self._scratch_start, self._workers)
        key = (graph.rows, graph.num_blocks)
        if key not in self._boxes:
            device = own["serial"].device
            self._boxes[key] = CandidateBox(graph.rows, graph.width, n, tree.width, device)
        self._boxes[key].export(
            own["serial"],
            out.top_tokens,
            out.top_scores,
            out.next_scores,
            tree.inputs["outcomes"],
        )
