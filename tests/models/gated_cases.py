"""Cases of test_triton_interpret: steps launched before their input is known.

Without a GPU they are launched when it is; what is given to them, and that nothing comes of those
that are void, is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Ahead, Lease, RowAhead, RowOutcome, SeqStart, StepPlan
from ipc.messages.target import StepRow as PlanRow
from ipc.rundir import RunDir
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepGraph, StepRow
from models.cuda.mailbox import Mailbox
from models.cuda.staging import Field, Staging
from models.registry import load_model
from ssd_pipe.verification.verifier import Verifier
from tests.models.tiny import make_tiny, perturbed, random_tokens
from tests.models.triton_cases import BLOCK, BLOCKS, PLAIN, SMALL, backend, graph_config
from tests.procs.test_target_steps import Chain
from tests.rounds.local_pipeline import LocalPipeline
from tests.rounds.test_ahead import AheadPipeline

CPU = torch.device("cpu")


def test_mail_is_what_a_copy_would_have_brought() -> None:
    """More words than one program fetches, and two launches whose mail is there at once."""
    fields = [Field("a", (3, 211), torch.int64), Field("b", (5,), torch.int32)]
    staging, copied = Staging(fields, CPU), Staging(fields, CPU)
    mailbox = Mailbox(staging)
    assert not staging.words.any()
    mailbox.fetch(1)  # nothing has come: nothing happens
    assert not staging.words.any()
    wanted = []
    for number in (1, 2):
        for one in (staging, copied):
            one.host["a"][:] = np.arange(633).reshape(3, 211) * number
            one.host["b"][:] = number
        copied.copy()
        wanted.append(copied.words.clone())
        mailbox.send(number)
    for number in (1, 2):
        mailbox.fetch(number)
        assert torch.equal(staging.words, wanted[number - 1])
    mailbox.fetch(3)  # the first one's place, which holds what is no longer wanted
    assert torch.equal(staging.words, wanted[1])


@pytest.fixture
def graph(tmp_path: Path) -> tuple[StepGraph, Any]:
    model = load_model(make_tiny(tmp_path, "llama", **SMALL), backend=backend(PLAIN))
    kv = model.make_kv(BLOCKS, BLOCK)
    return GraphRunner(model, kv, 2, 24, post=True, mail=True).graph(2, 3, 6), kv


ROWS = [
    StepRow([3, 1], 0, [5, 9, 3], seed=2**63 + 1, temperature=1.0, streams=[0, 1, 2]),
    StepRow([7], 0, [8], seed=4),
]


def test_a_launch_gets_the_same_from_its_mail_as_from_a_copy(graph: tuple[StepGraph, Any]) -> None:
    step, kv = graph
    assert step.posting is not None
    loaded = step.run(ROWS)
    logits, chosen, keys = loaded.logits.clone(), loaded.chosen.clone(), kv.keys[0].clone()
    step.run([StepRow([2], 0, [1, 2, 3])])
    step.launch_ahead()
    step.mail(ROWS)
    for i, row in enumerate(ROWS):
        count = len(row.tokens)
        assert torch.equal(step.output.logits[i, :count], logits[i, :count])
        assert step.posting.choices(3)[i, :count].tolist() == chosen[i, :count].tolist()
    assert torch.equal(kv.keys[0][[3, 1, 7]], keys[[3, 1, 7]])


def test_a_void_launch_leaves_nothing_and_the_next_one_is_as_ever(
    graph: tuple[StepGraph, Any],
) -> None:
    step, kv = graph
    assert step.posting is not None
    chosen = step.run(ROWS).chosen.clone()
    keys = kv.keys[0].clone()
    step.launch_ahead()
    step.mail([])
    assert step.posting.arrived(2)
    assert torch.equal(kv.keys[0], keys)
    step.run(ROWS)
    assert step.posting.choices(3)[0].tolist() == chosen[0].tolist()
    step.launch_ahead()
    with pytest.raises(ValueError, match="row 0"):
        step.mail([StepRow([1], 3, [1, 2])])
    step.mail([])
    assert step.posting.arrived(4)


def test_graphs_that_take_no_mail_are_not_launched_ahead(tmp_path: Path) -> None:
    model = load_model(make_tiny(tmp_path, "llama", **SMALL), backend=backend(PLAIN))
    step = GraphRunner(model, model.make_kv(BLOCKS, BLOCK), 1, 24, post=True).graph(1, 3, 1)
    with pytest.raises(RuntimeError, match="takes no mail"):
        step.launch_ahead()
    with pytest.raises(RuntimeError, match="takes no mail"):
        step.mail([])
    assert step.launches == 0


# ---------------------------------------------------------------- verifier


class Target:
    """A verifier with one sequence (slot 0) that has its prompt; its launches are counted."""

    def __init__(self, folder: Path, key: NoiseKey | None = None, ahead: bool = True) -> None:
        pipeline = LocalPipeline(
            "ssd", folder, folder, graph_config(), backend=backend(PLAIN), graphs=True, ahead=ahead
        )
        self.verifier: Verifier = pipeline.verifier
        prompt = PlanRow(0, 0, [5, 9, 3], 0, True, [0, 1])
        begin = [SeqStart(1, 0, key or NoiseKey())]
        self.token = self.verifier.run(StepPlan(1, [prompt], begin)).outcomes[0].token
        self.step = 1

    def plan(self, tokens: list[int], start: int = 3, **more: Any) -> StepPlan:
        self.step += 1
        return StepPlan(self.step, [PlanRow(0, start, tokens, len(tokens) - 1, True, [])], **more)

    def leave(self, k: int = 2, left: int = 20, after: int = 0) -> Ahead:
        return Ahead(after or self.step, k, 0, [RowAhead(0, left, [], [])])

    def verify(self, plan: StepPlan, leave: Ahead | None = None) -> tuple[RowOutcome, list[bool]]:
        """The outcome of its first row, and whether the step after it was launched ahead."""
        said: list[bool] = []

        def meanwhile() -> None:
            if leave is not None and not said:
                said.append(self.verifier.go_on(plan, leave))

        outcome = self.verifier.run(plan, meanwhile).outcomes[0]
        return outcome, said

    def launches(self) -> int:
        steps = self.verifier._steps
        assert steps is not None
        return steps._runner.graph(1, 3, 2).launches


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path, "llama", **SMALL)


def planned(folder: Path, key: NoiseKey | None = None) -> list[RowOutcome]:
    """Two steps of chains, each launched when it was known."""
    target = Target(folder, key, ahead=False)
    first, said = target.verify(target.plan([target.token, 4, 6]), target.leave())
    assert said == [False]
    second, _ = target.verify(target.plan([first.token, 7], 4 + first.accepted))
    return [first, second]


@pytest.mark.parametrize("key", [NoiseKey(), NoiseKey(6, 1.0)], ids=["greedy", "T"])
@pytest.mark.parametrize("queue", [False, True])
def test_a_step_that_waits_becomes_the_next_one(folder: Path, key: NoiseKey, queue: bool) -> None:
    expected = planned(folder, key)
    target = Target(folder, key)
    plan = target.plan([target.token, 4, 6])
    first, said = target.verify(plan, target.leave())
    assert said == [True]
    assert target.verifier.gated
    before = target.launches()
    plan = target.plan([first.token, 7], 4 + first.accepted)
    assert not queue or target.verifier.queue(plan)
    assert queue is not target.verifier.gated
    verified = target.verifier.run(plan)
    assert [first, *verified.outcomes] == expected
    assert 0 < verified.mailed_ns <= verified.forward_ns
    assert target.launches() == before
    assert not target.verifier.gated
    # Steps of the usual kind follow, of which no such time is told.
    again = target.plan([verified.outcomes[0].token], 5 + first.accepted)
    assert target.verifier.run(again).mailed_ns == 0
    assert target.launches() == before + 1


def prompt(slot: int, length: int) -> PlanRow:
    return PlanRow(slot, 0, random_tokens(length, 33, 1), 0, True, [8, 9, 10])


VOID: dict[str, Callable[[Target, PlanRow], None]] = {
    "a prompt": lambda t, row: t.verifier.run(StepPlan(9, [prompt(0, 9)])),
    "a prompt beside the row": lambda t, row: t.verifier.run(
        StepPlan(9, [row, prompt(1, 9)], [SeqStart(2, 1, NoiseKey())])
    ),
    "another row beside it": lambda t, row: t.verifier.run(
        StepPlan(9, [row, prompt(1, 2)], [SeqStart(2, 1, NoiseKey())])
    ),
    "release": lambda t, row: t.verifier.release(),
    "close": lambda t, row: t.verifier.close(),
}


@pytest.mark.parametrize("what", VOID)
def test_whatever_else_is_to_be_done_voids_it(folder: Path, what: str) -> None:
    expected = planned(folder)
    target = Target(folder)
    first, said = target.verify(target.plan([target.token, 4, 6]), target.leave())
    assert said == [True]
    plan = target.plan([first.token, 7], 4 + first.accepted)
    VOID[what](target, plan.rows[0])
    assert not target.verifier.gated
    if what in ("release", "another row beside it", "a prompt beside the row"):
        assert target.verify(plan) == (expected[1], [])


def test_a_lease_voids_it(folder: Path) -> None:
    target = Target(folder)
    first, said = target.verify(target.plan([target.token, 4, 6]), target.leave())
    assert said == [True]
    plan = target.plan([first.token], 4 + first.accepted, lease=Lease(1, 1, 0, 0, 0, []))
    with pytest.raises(RuntimeError, match="cannot take one"):
        target.verifier.begin_lease(plan)
    assert not target.verifier.gated


@pytest.mark.parametrize(
    ("key", "logprobs"),
    [(NoiseKey(4, 1.0, 0.8), -1), (NoiseKey(), 0)],
    ids=["filtered", "logprobs"],
)
def test_nothing_waits_behind_a_step_whose_logits_are_read(
    folder: Path, key: NoiseKey, logprobs: int
) -> None:
    target = Target(folder)
    other = StepPlan(2, [prompt(1, 3)], [SeqStart(2, 1, key, logprobs=logprobs)])
    target.verifier.run(other)
    rows = [target.plan([target.token, 4]).rows[0], PlanRow(1, 3, [7], 0, True, [])]
    own = RowAhead(0, 20, [], [])
    plan = StepPlan(3, rows)
    leave = Ahead(3, 2, 0, [own, own])
    assert target.verify(plan, leave)[1] == [False]
    # It may be the step that waits all the same.
    _, said = target.verify(target.plan([target.token, 4, 6]), target.leave())
    assert said == [True]
    plan = StepPlan(9, [PlanRow(1, 3, [7], 0, True, [])])
    assert target.verifier.run(plan).mailed_ns > 0


@pytest.mark.parametrize(
    "leave",
    [
        {"after": 1},
        {"left": 4},  # the row may end with this very step
        {"k": 0},  # it does not decode alone
    ],
)
def test_leave_that_does_not_fit_launches_nothing(folder: Path, leave: dict[str, int]) -> None:
    target = Target(folder)
    plan = target.plan([target.token, 4, 6])
    assert target.verify(plan, target.leave(**leave))[1] == [False]
    assert not target.verifier.gated


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_target_begins_a_step_that_waits_with_the_chain_it_has_found(
    folder: Path, tmp_path: Path, withdrawn: bool
) -> None:
    with RunDir.create(tmp_path, "r") as rundir:
        chain = Chain(folder, rundir, backend=backend(PLAIN), graphs=True, ahead=True)
        verifier = chain.desk.verifier
        for depth in (1, 2):
            chain.publish(depth)
        launched = time.monotonic_ns()
        first, *others = chain.decode(0, withdrawn)
        assert verifier.gated is withdrawn  # which is the next plan's, whatever it is
        if withdrawn:
            assert (first.found, others) == ([], [])
            return
        [second] = others
        assert first.found[0].chain == [11, 12]
        assert launched < first.looked_up_ns < second.started_ns < second.finished_ns
        token = first.outcomes[0].token
        [planned] = chain.desk.decode(3, 4, token, [11, 12])
        assert planned.outcomes == second.outcomes


# ---------------------------------------------------------------- rounds


class GatedPipeline(AheadPipeline):
    """Launches steps ahead wherever it has leave. ``gates`` counts them, ``mailed`` those used."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.gates = self.mailed = 0

    def _verify(self, plan: StepPlan, leave: Ahead | None) -> list[RowOutcome]:
        said: list[bool] = []

        def meanwhile() -> None:
            if leave is not None and leave.k and not said:
                said.append(self.verifier.go_on(plan, leave))

        verified = self.verifier.run(plan, meanwhile)
        self.gates += any(said)
        self.mailed += verified.mailed_ns > 0
        return verified.outcomes


def test_rounds_launched_ahead_emit_what_the_target_alone_does(tmp_path: Path) -> None:
    """A row that another joins, and outlives."""
    target = make_tiny(tmp_path, "llama", **SMALL | {"vocab_size": 13})
    draft = perturbed(target, tmp_path / "near", 0.1)
    config = graph_config(adaptive=False, fan_out=1)
    keys = [NoiseKey(), NoiseKey(seed=3, temperature=1.0)]

    def emitted(pipeline: LocalPipeline) -> dict[int, list[int]]:
        for rid, key in enumerate(keys):
            pipeline.add(rid, random_tokens(2 + rid, 13, rid), (9, 3)[rid], key)
            if rid == 0:
                pipeline.step()
                pipeline.step()
        return pipeline.run()

    gated = GatedPipeline(
        "ssd",
        target,
        draft,
        config,
        backend=backend(PLAIN),
        draft_backend="reference",
        graphs=True,
        ahead=True,
    )
    plain = LocalPipeline("ar", target, draft, config)
    assert emitted(gated) == emitted(plain)
    assert gated.gates >= gated.mailed > 0
    assert gated.target_blocks.num_free == gated.target_blocks.num_blocks
