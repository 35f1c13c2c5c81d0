"""Steps that wait on a GPU for their input: what comes of them, and what may follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: torch.cuda.is_available() is false", allow_module_level=True)
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from ipc.messages.sampling import NoiseKey
from ipc.messages.target import Ahead, RowAhead, RowOutcome, SeqStart, StepPlan
from ipc.messages.target import StepRow as PlanRow
from models.cuda.graph_runner import GraphRunner
from models.cuda.graphs import StepGraph, StepRow
from models.cuda.mailbox import Mailbox
from models.cuda.staging import Field, Staging
from models.kv_cache import KVCache
from models.registry import load_model
from models.sequence_batch import build_batch
from models.transformer import Transformer
from ssd_pipe.verification.graphed import GraphedSteps
from ssd_pipe.verification.verifier import Verifier
from tests.models.tiny import make_tiny

BLOCK, BLOCKS, WIDTH, POSITIONS = 16, 64, 4, 256
SOON = 30.0  # seconds
ROWS = [
    StepRow([3, 1], 15, [5, 9, 3], seed=2**63 + 1, temperature=1.0),
    StepRow([7], 0, [8], seed=4),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = make_tiny(tmp_path_factory.mktemp("model"), "llama", vocab_size=61)
    return load_model(folder, device="cuda", dtype="bfloat16")


@pytest.fixture
def graph(model: Transformer) -> Iterator[tuple[StepGraph, KVCache]]:
    kv = model.make_kv(BLOCKS, BLOCK)
    runner = GraphRunner(model, kv, 2, POSITIONS, post=True, mail=True)
    step = runner.graph(2, WIDTH, POSITIONS // BLOCK)
    yield step, kv
    step.mail([])  # a test that fails leaves nothing waiting
    torch.cuda.synchronize()


def arrived(step: StepGraph, number: int) -> np.ndarray:
    """The choices of a launch, once they are there."""
    assert step.posting is not None
    end = time.monotonic() + SOON
    while not step.posting.arrived(number):
        assert time.monotonic() < end
    return step.posting.choices(number).copy()


def idle() -> bool:
    return torch.cuda.current_stream().query()


def eager_pass(model: Transformer, kv: KVCache) -> torch.Tensor:
    """Logits of a prompt, [V] on the host."""
    batch = build_batch([([20, 21], 0, [4, 5, 6, 7], 3)], BLOCK, model.backend.device)
    logits = model.logits(model.forward(batch, kv))
    assert logits is not None
    return logits[0].cpu()


@torch.inference_mode()
def test_mail_reaches_launches_that_wait_for_it() -> None:
    """More words than one program fetches; two launches wait, and one mail comes at a time."""
    staging = Staging([Field("a", (3, 611), torch.int64)], torch.device("cuda"))
    mailbox = Mailbox(staging)
    torch.cuda.synchronize()
    kept = [torch.zeros_like(staging.words) for _ in range(2)]
    kept[0].copy_(staging.words)  # whatever is loaded for that would wait behind what waits
    torch.cuda.synchronize()
    for number in (1, 2):
        mailbox.fetch(number)
        kept[number - 1].copy_(staging.words)
    waited = not idle()
    for number in (1, 2):
        staging.host["a"][:] = np.arange(1833).reshape(3, 611) * number
        mailbox.send(number)
    torch.cuda.synchronize()
    assert waited
    for number in (1, 2):
        assert torch.equal(kept[number - 1].cpu()[:1833], torch.arange(1833) * number)


@torch.inference_mode()
def test_a_launch_gets_the_same_from_its_mail_as_from_a_copy(
    graph: tuple[StepGraph, KVCache],
) -> None:
    step, kv = graph
    step.run(ROWS)
    chosen = arrived(step, 1)
    torch.cuda.synchronize()
    logits, keys = step.output.logits.clone(), kv.keys[0].clone()
    step.run([StepRow([2], 0, [1, 2, 3])])
    step.launch_ahead()
    arrived(step, 2)
    assert step.posting is not None
    assert not idle()
    assert not step.posting.arrived(3)
    step.mail(ROWS)
    again = arrived(step, 3)
    torch.cuda.synchronize()
    for i, row in enumerate(ROWS):
        count = len(row.tokens)
        assert again[i, :count].tolist() == chosen[i, :count].tolist()
        assert torch.equal(step.output.logits[i, :count], logits[i, :count])
    assert torch.equal(kv.keys[0][[3, 1, 7]], keys[[3, 1, 7]])


@torch.inference_mode()
def test_after_a_void_launch_everything_runs_and_nothing_was_written(
    model: Transformer, graph: tuple[StepGraph, KVCache]
) -> None:
    step, kv = graph
    expected = eager_pass(model, kv)
    step.run(ROWS)
    chosen = arrived(step, 1)
    torch.cuda.synchronize()
    keys = kv.keys[0].clone()
    step.launch_ahead()
    step.mail([])
    assert torch.equal(eager_pass(model, kv), expected)
    assert torch.equal(kv.keys[0], keys)
    step.run(ROWS)
    again = arrived(step, 3)
    for i, row in enumerate(ROWS):
        assert again[i, : len(row.tokens)].tolist() == chosen[i, : len(row.tokens)].tolist()
    for number in range(4, 60, 2):  # in turn, without a pause
        step.launch_ahead()
        step.mail(ROWS if number % 4 else [])
        step.run(ROWS)
        again = arrived(step, number + 1)
        assert again[0, :3].tolist() == chosen[0, :3].tolist()


class Target:
    """A verifier with one sequence (slot 0) that has its prompt."""

    def __init__(self, model: Transformer, ahead: bool) -> None:
        kv = model.make_kv(BLOCKS, BLOCK)
        steps = GraphedSteps(model, kv, 2, POSITIONS, (WIDTH,), ahead=ahead)
        steps.warm_up()
        self.verifier = Verifier(model, kv, BLOCK, "shared_noise", lambda *_: None, None, steps)
        prompt = PlanRow(0, 0, [5, 9, 3], 0, True, list(range(8)))
        plan = StepPlan(1, [prompt], [SeqStart(1, 0, NoiseKey(6, 1.0))])
        self.token = self.verifier.run(plan).outcomes[0].token
        self.ahead, self.step, self.start = ahead, 1, 3

    def round(self, chain: list[int], void: Callable[[Target], None] | None = None) -> RowOutcome:
        """A step of a chain; the one after it waits meanwhile, where steps are launched ahead."""
        self.step += 1
        row = PlanRow(0, self.start, [self.token, *chain], len(chain), True, [])
        plan = StepPlan(self.step, [row])
        leave = Ahead(self.step, WIDTH - 1, 0, [RowAhead(0, 99, [], [])])
        said: list[bool] = []

        def meanwhile() -> None:
            if not said:
                said.append(self.verifier.go_on(plan, leave))

        outcome = self.verifier.run(plan, meanwhile).outcomes[0]
        assert said == [self.ahead]
        assert self.verifier.gated is self.ahead
        if void is not None:
            void(self)
            assert not self.verifier.gated
        self.start += 1 + outcome.accepted
        self.token = outcome.token
        return outcome


def prompt_of_another(target: Target) -> None:
    row = PlanRow(1, 0, list(range(20)), 0, True, [8, 9])
    target.verifier.run(StepPlan(99, [row], [SeqStart(2, 1, NoiseKey())]))


@pytest.mark.parametrize(
    "void",
    [None, prompt_of_another, lambda t: t.verifier.release()],
    ids=["none", "prompt", "idle"],
)
def test_rounds_are_the_same_whether_steps_wait_for_their_input_or_not(
    model: Transformer, void: Callable[[Target], None] | None
) -> None:
    said = []
    for ahead in (False, True):
        target = Target(model, ahead)
        try:
            said.append(
                [
                    target.round([(7 * i + j) % 61 for j in range(i % 4)], void if i % 3 else None)
                    for i in range(24)
                ]
            )
        finally:
            target.verifier.close()
            torch.cuda.synchronize()
    assert said[0] == said[1]


def test_an_input_is_taken_up_sooner_than_a_launch(model: Transformer) -> None:
    """Medians of many: from when the host begins to when the choices of a step are there."""
    kv = model.make_kv(BLOCKS, BLOCK)
    step = GraphRunner(model, kv, 1, POSITIONS, post=True, mail=True).graph(1, WIDTH, 16)
    rows, took = ROWS[:1], {False: list[int](), True: list[int]()}
    with torch.inference_mode():
        for i in range(200):
            ahead = bool(i % 2)
            if ahead:
                step.launch_ahead()
                time.sleep(2e-4)
            begun = time.monotonic_ns()
            if ahead:
                step.mail(rows)
            else:
                step.run(rows)
            arrived(step, step.launches)
            took[ahead].append(time.monotonic_ns() - begun)
    launched, mailed = (float(np.median(times)) for times in took.values())
    print(f"launched {launched * 1e-3:.1f} us, mailed {mailed * 1e-3:.1f} us")
    assert mailed < launched
