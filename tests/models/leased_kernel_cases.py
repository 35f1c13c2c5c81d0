"""The kernels of leased rounds, one row at a time: under the interpreter on the CPU, compiled on a
GPU (tests/gpu)."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ipc import round_records as rr
from ipc.round_records import RoundRecords
from models.cuda.fork_hooks import ForkHooks, ForkRow
from models.cuda.rounds import layout
from models.cuda.rounds.follow import WANTED_WORDS, Fed, Follower, Mode, Verdict
from models.cuda.rounds.gate import gate
from models.cuda.rounds.publish import publish_depth, publish_keys
from models.cuda.rounds.settle import settle
from models.cuda.rounds.tables import RoundTables
from ssd_pipe.drafting.candidates import AcceptanceCurve, ChainScores
from ssd_pipe.engine import fanout
from ssd_pipe.engine.hashing import extend_all
from ssd_pipe.engine.partition import Share
from ssd_pipe.sampling.noise import SHARED, row_keys

K, ENTRIES, SLOTS, VOCAB = 3, 5, 4, 40
PATIENCE_NS = 2_000_000
I64 = torch.int64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=I64, device=DEVICE)


class Bench:
    """One row's memory, as a lease of ``LeasedRounds.load`` would leave it."""

    def __init__(self, left: int = 100, stops: tuple[int, ...] = (), waits: int = 0) -> None:
        size = RoundRecords.size_bytes(SLOTS, K)
        memory = torch.zeros(size, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
        self.records = RoundRecords(memory.numpy(), SLOTS, K)
        words = memory.view(I64)
        mail, ring = rr.CONTROL, rr.CONTROL + self.records.mail.size
        self.table = zeros(SLOTS, layout.table_words(ENTRIES, K))
        self.tables = RoundTables(
            self.table,
            ENTRIES,
            K,
            VOCAB,
            control=words[:mail],
            mail=words[mail:ring],
            records=words[ring:],
            max_rows=SLOTS,
        )
        self.state = zeros(SLOTS, layout.STATE_WORDS)
        self.lease = zeros(layout.LEASE_WORDS)
        self.draws = zeros(rr.ROUNDS, SLOTS)
        self.lease[layout.WAITS] = waits
        self.lease[layout.PATIENCE] = self.lease[layout.BACKUP_PATIENCE] = PATIENCE_NS
        self.inputs = {
            "tokens": zeros(1, K + 1),
            "starts": torch.tensor([50], device=DEVICE),
            "counts": torch.ones(1, dtype=torch.int32, device=DEVICE),
        }
        self.prefix = 2**64 - 5
        row = np.zeros(layout.STATE_WORDS, np.int64)
        row[[layout.MODE, layout.AT, layout.LEFT, layout.SLOT]] = layout.RUN, 7, left, 2
        row.view(np.uint64)[layout.HASH] = self.prefix
        row[layout.STATE_HEAD :] = -1
        row[layout.STATE_HEAD : layout.STATE_HEAD + len(stops)] = stops
        self.state[0] = torch.from_numpy(row)

    def publish(
        self, outcomes: list[tuple[int, int]], tokens: list[list[int]], number: int
    ) -> None:
        """Through the draft's kernels; ``tokens`` by depth."""
        keys = torch.full((1, ENTRIES), -1, device=DEVICE)
        keys[0, : len(outcomes)] = torch.tensor([k << 32 | t for k, t in outcomes])
        numbers, homes = torch.tensor([[number], [2]], device=DEVICE)
        hashes = torch.from_numpy(np.array([self.prefix], np.uint64).view(np.int64)).to(DEVICE)
        publish_keys(self.tables, numbers, homes, hashes, keys)
        for depth, column in enumerate(tokens, 1):
            chosen = zeros(1, ENTRIES)
            chosen[0, : len(column)] = torch.tensor(column)
            publish_depth(self.tables, numbers, homes, chosen, depth)

    def settle(self, chain: list[int], chosen: list[int], synthetic: bool = False) -> rr.Record:
        self.inputs["tokens"][0, 1 : 1 + len(chain)] = torch.tensor(chain, dtype=I64)
        self.inputs["counts"][0] = 1 + len(chain)
        choices = torch.tensor([chosen + [0] * (K + 1 - len(chosen))], device=DEVICE)
        settle(self.tables, choices, self.inputs, self.state, self.lease, self.draws, synthetic)
        return self.record(7)

    def record(self, number: int) -> rr.Record:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found = self.records.round(number, 1)
        assert found is not None
        return found[0]

    def gate(self) -> None:
        gate(self.tables, self.inputs["tokens"], self.inputs["counts"], self.state, self.lease)

    @property
    def row(self) -> list[int]:
        return self.state[0].tolist()

    @property
    def fed(self) -> list[int]:
        return self.inputs["tokens"][0, : int(self.inputs["counts"][0])].tolist()


def test_a_hit_becomes_the_next_input() -> None:
    bench = Bench()
    bench.publish([(1, 9), (2, 9), (2, 8)], [[11, 12, 13], [21, 22, 23]], 7)
    record = bench.settle([4, 5, 6], [4, 5, 9, 1])
    assert record[:5] == (2, 9, [4, 5, 6], 1, [12, 22])
    assert record.room == K
    assert record.flags == 0
    assert bench.fed == [9, 12, 22]
    assert int(bench.inputs["starts"][0]) == 53
    assert bench.row[layout.AT] == 8
    assert bench.row[layout.LEFT] == 97
    assert not bench.row[layout.NEED]
    assert bench.row[layout.HASH] % 2**64 == extend_all(bench.prefix, [4, 5, 9])


@pytest.mark.parametrize(
    ("number", "outcome", "tokens"),
    [(6, (2, 9), [1]), (7, (1, 9), [1]), (7, (2, 9), []), (7, (2, 9), [VOCAB]), (7, (2, 9), [-3])],
    ids=["another round", "another outcome", "no token yet", "no token id", "negative"],
)
def test_what_is_not_there_is_a_miss(
    number: int, outcome: tuple[int, int], tokens: list[int]
) -> None:
    bench = Bench()
    bench.publish([outcome], [[t] for t in tokens], number)
    record = bench.settle([4, 5], [4, 5, 9])
    assert (record.accepted, record.token, record.next) == (2, 9, [])
    assert bench.fed == [9]
    assert bench.row[layout.NEED]


def test_another_prefix_is_a_miss() -> None:
    bench = Bench()
    bench.publish([(0, 9)], [[1]], 7)
    bench.state[0, layout.HASH] += 1
    assert bench.settle([], [9]).next == []


def test_a_missed_row_takes_the_chain_it_is_sent() -> None:
    bench = Bench()
    bench.settle([4], [3])
    bench.records.answer(2, 7, [30, 31])
    bench.gate()
    assert bench.fed == [3, 30, 31]
    assert not bench.row[layout.NEED]


@pytest.mark.parametrize(("number", "tokens"), [(6, [30]), (7, [VOCAB]), (7, [])])
def test_a_missed_row_goes_on_without_a_good_chain(number: int, tokens: list[int]) -> None:
    bench = Bench()
    bench.settle([4], [3])
    bench.records.answer(2, number, tokens)
    bench.gate()
    assert bench.fed == [3]


@pytest.mark.parametrize(
    ("left", "stops", "finished"),
    [
        (100, (), False),
        (3, (), True),
        (4, (), False),
        (100, (5,), True),
        (100, (7, 9), True),
        (100, (6,), False),
        (2, (9,), True),
    ],
)
def test_a_row_ends_where_the_scheduler_says(
    left: int, stops: tuple[int, ...], finished: bool
) -> None:
    bench = Bench(left, stops)
    record = bench.settle([4, 5, 6], [4, 5, 9, 1])
    assert record.finished is finished
    assert bench.row[layout.MODE] == (layout.ENDED if finished else layout.RUN)
    assert bench.fed == ([] if finished else [9])
    if not finished:
        assert record.room == max(0, min(K, left - 4))
        return
    bench.gate()
    settle(
        bench.tables,
        zeros(1, K + 1),
        bench.inputs,
        bench.state,
        bench.lease,
        bench.draws,
        False,
    )
    assert bench.record(8).idle


def test_the_chain_of_the_next_round_fits_its_room() -> None:
    bench = Bench(left=5)
    bench.publish([(2, 9)], [[11], [12], [13]], 7)
    record = bench.settle([4, 5, 6], [4, 5, 9, 1])
    assert record.next == [11, 12, 13]
    assert record.room == 1
    assert bench.fed == [9, 11]


def test_waits_end_and_say_how() -> None:
    bench = Bench(waits=rr.WAIT_BRANCHES | 1)
    assert bench.settle([4], [3]).flags & rr.LATE
    skipped = Bench(waits=rr.WAIT_BRANCHES | 1)
    skipped.records.skip(2, 7)
    record = skipped.settle([4], [3])
    assert record.flags == 0
    assert record.looks
    aborted = Bench(waits=rr.WAIT_BRANCHES | 1)
    aborted.records.abort()
    assert aborted.settle([4], [3]).flags & rr.ABORTED


def test_rows_out_of_a_lease_are_left_alone() -> None:
    bench = Bench()
    bench.state.zero_()
    before = {name: tensor.clone() for name, tensor in bench.inputs.items()}
    bench.gate()
    settle(
        bench.tables,
        zeros(1, K + 1) + 1,
        bench.inputs,
        bench.state,
        bench.lease,
        bench.draws,
        False,
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in bench.inputs.items())
    assert not bench.records.words.any()
    assert not bench.state.any()


@pytest.mark.parametrize("hit", [False, True])
def test_replayed_outcomes(hit: bool) -> None:
    bench = Bench()
    bench.publish([(2, 9), (2, 8), (1, 3)], [[11, 12, 13]], 7)
    bench.lease[layout.FIRST] = 5
    bench.draws[2, 0] = 2 * 2 + hit
    record = bench.settle([4, 5, 6], [30, 31, 32, 33], synthetic=True)
    assert record.accepted == 2
    assert record.token in (9, 8) if hit else record.token not in (9, 8, 3)
    assert bool(record.next) is hit
    assert bench.fed[0] == record.token


def test_random_rounds_follow_the_rule() -> None:
    rng = random.Random(4)
    for _ in range(40):
        bench = Bench(left=rng.randint(1, 12), stops=(rng.randrange(4), 39))
        chain = [rng.randrange(4) for _ in range(rng.randint(0, K))]
        chosen = [rng.randrange(4) for _ in range(len(chain) + 1)]
        k = next((i for i, t in enumerate(chain) if t != chosen[i]), len(chain))
        outcomes = list({(rng.randint(0, K), rng.randrange(4)) for _ in range(ENTRIES)})
        depth = rng.randint(0, K)
        tokens = [[rng.randrange(VOCAB) for _ in outcomes] for _ in range(depth)]
        bench.publish(outcomes, tokens, 7)
        record = bench.settle(chain, chosen)
        assert (record.accepted, record.token, record.chain) == (k, chosen[k], chain)
        found = (k, chosen[k]) in outcomes
        entry = outcomes.index((k, chosen[k])) if found else -1
        assert record.entry == entry
        assert record.next == ([column[entry] for column in tokens] if found else [])


@pytest.mark.parametrize(
    ("limits", "branches", "workers"),
    [(None, 6, 1), ([2, 1, 0, 3], 6, 1), (None, 200, 1), (None, 3, 2), ([2, 1, 0, 3], 2, 3)],
    ids=str,
)
def test_the_gpu_chooses_the_branches_the_host_would(
    limits: list[int] | None, branches: int, workers: int
) -> None:
    """Two rows behind different lags; the tree's inputs are what ``GraphedDraft`` would load,
    whatever the last tree left there, also where there is room for more than there are, or where
    other workers take most of them."""
    rng = np.random.default_rng(5)
    rows, width, n, steps = 2, K + 1, 16, 3
    scores = -np.sort(-rng.normal(size=(rows, width, n)) * 3).astype(np.float32)
    tokens = np.stack([[rng.permutation(90)[:n] for _ in range(width)] for _ in range(rows)])
    fed = rng.integers(0, 90, (rows, width))
    fed[0, 2], fed[1, 1] = tokens[0, 1, 0], tokens[1, 0, 3]
    own = rng.normal(size=(rows, width)).astype(np.float32)
    own[0, 1], own[1, 0] = scores[0, 1, 0], scores[1, 0, 3]
    firsts, counts, starts, seeds = [0, 1], [4, 3], [20, 33], [5, 2**63 + 7]
    tau, budgets, homes, scratch = [0.7, 1.2], [6, 4], [3, 1], 1000

    def on(array: object, dtype: torch.dtype = I64) -> torch.Tensor:
        return torch.as_tensor(np.asarray(array)).to(DEVICE, dtype)

    given = {
        "tokens": on(fed),
        "starts": on(starts),
        "counts": on(counts, torch.int32),
        "seeds": on(np.array(seeds, np.uint64).view(np.int64)),
    }
    tree = SimpleNamespace(
        rows=rows,
        width=branches,
        steps=steps,
        inputs={
            name: zeros(rows * branches)
            for name in ("tokens", "positions", "slots", "live", "context_lens")
        }
        | {"homes": on(homes), "keys": zeros(steps, rows * branches)}
        | {"outcomes": zeros(rows, branches)},
    )
    for name in ("live", "context_lens"):
        tree.inputs[name] = tree.inputs[name].int()
    for name in ("live", "context_lens", "outcomes"):
        tree.inputs[name].fill_(1)
    output = SimpleNamespace(
        top_scores=on(scores, torch.float32),
        top_tokens=on(tokens),
        next_scores=on(own, torch.float32),
    )
    graph = SimpleNamespace(output=output, inputs=given, rows=rows, num_blocks=1, width=width)
    device = torch.device(DEVICE)
    hooks = ForkHooks(
        rows, width, device, scratch, lambda r, b: tree, Follower(None, device), workers
    )
    per_k = limits or [n] * width
    share = Share(workers - 1, workers)
    choices = [
        ForkRow(firsts[i], share.first(homes[i]), budgets[i], tau[i], per_k) for i in range(rows)
    ]
    assert hooks.arm(choices) == 1
    hooks.tail(graph)
    box = hooks.box(graph)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert box.arrived(1)
    assert not box.arrived(2)
    got = {name: tensor.cpu().numpy() for name, tensor in tree.inputs.items()}
    for shown, wanted in zip(box.side(1), (tokens, scores, own, got["outcomes"]), strict=True):
        assert (shown == np.asarray(wanted, shown.dtype)).all()
    for i in range(rows):
        chain = fed[i, firsts[i] + 1 : counts[i]].tolist()
        span = slice(firsts[i], counts[i])
        known = ChainScores(
            tokens[i, span], scores[i, span].astype(float), chain, own[i, span].astype(float)[:-1]
        )
        accept, weights = known.weights(tau[i], AcceptanceCurve())
        exclude = np.append(np.array(chain), -1)[:, None]
        ranked = fanout.select_branches(
            np.where(known.tokens == exclude, -1, known.tokens),
            weights,
            accept,
            None if limits is None else limits[: len(chain) + 1],
            budgets[i],
        )
        wanted = list(share.of(homes[i], ranked))
        packed = got["outcomes"][i].tolist()
        assert [(o >> 32, o & 0xFFFFFFFF) for o in packed if o >= 0] == wanted
        assert packed[len(wanted) :] == [-1] * (branches - len(wanted))
        mine = slice(i * branches, i * branches + len(wanted))
        length = starts[i] + firsts[i] + 1
        places = [length + k for k, _ in wanted]
        assert got["tokens"][mine].tolist() == [t for _, t in wanted]
        assert got["positions"][mine].tolist() == got["context_lens"][mine].tolist() == places
        row_live = got["live"][i * branches : (i + 1) * branches].tolist()
        assert row_live == [1] * len(wanted) + [0] * (branches - len(wanted))
        first_slot = scratch + homes[i] * branches * steps
        assert got["slots"][mine].tolist() == [first_slot + e * steps for e in range(len(wanted))]
        for step in range(steps):
            expected = row_keys([seeds[i]], np.array(places) + 1 + step, SHARED)
            assert (got["keys"][step, mine].view(np.uint64) == expected).all()
    hooks.disarm()
    tree.inputs["outcomes"].fill_(9)
    hooks.tail(graph)
    assert (tree.inputs["outcomes"] == 9).all()
    assert not box.arrived(2)


class Follow:
    """A glue pass of one row that follows record 7 of a Bench."""

    def __init__(self, bench: Bench, mode: Mode = Mode.FOLLOW, place: int = 0) -> None:
        self.follower = Follower(bench.tables, torch.device(DEVICE))
        wanted = np.zeros(WANTED_WORDS, np.int64)
        wanted[:3] = mode, 7, 51
        wanted.view(np.uint64)[3] = bench.prefix
        wanted[4] = place
        self.given = torch.tensor([9, 12, -1, -1], device=DEVICE)
        self.wanted = torch.from_numpy(wanted).to(DEVICE)
        self.options = torch.arange((K + 1) ** 2, dtype=torch.int32, device=DEVICE)

        def narrow(*shape: int) -> torch.Tensor:
            return torch.full(shape, 6, dtype=torch.int32, device=DEVICE)

        self.fed = Fed(
            zeros(1, K + 1) + 99,
            zeros(1),
            narrow(1),
            narrow(1),
            narrow(1, K + 1),
            zeros(1),
            zeros(1),
        )

    def launch(self) -> None:
        self.follower.feed(self.wanted, self.given, self.options.view(K + 1, K + 1), self.fed)

    def verdict(self, number: int = 7) -> Verdict | None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return self.follower.verdict(number)

    @property
    def tokens(self) -> list[int]:
        return self.fed.tokens[0, : int(self.fed.counts)].tolist()


def test_a_glue_pass_feeds_itself_what_a_hit_says() -> None:
    bench = Bench()
    bench.publish([(1, 9), (2, 9)], [[11, 12], [21, 22]], 7)
    bench.settle([4, 5, 6], [4, 5, 9, 1])
    ahead = Follow(bench)
    ahead.launch()
    assert ahead.verdict() is Verdict.HIT
    assert ahead.tokens == [9, 12, 22]
    assert ahead.fed.tokens[0, 3:].tolist() == [0]
    assert int(ahead.fed.starts) == 53
    assert int(ahead.fed.budgets) == 6
    assert ahead.fed.limits[0].tolist() == [2 * (K + 1) + i for i in range(K + 1)]
    assert int(ahead.fed.numbers) == 8
    assert int(ahead.fed.hashes) % 2**64 == extend_all(bench.prefix, [4, 5, 9])
    assert ahead.verdict(8) is None


def test_a_row_that_goes_on_alone_is_followed_where_its_records_are() -> None:
    bench = Bench()
    bench.publish([(1, 9), (2, 9)], [[11, 12], [21, 22]], 7)
    bench.settle([4, 5, 6], [4, 5, 9, 1])
    records = bench.records.records[7]
    records[2], records[0, rr.FLAGS] = records[0], rr.IDLE
    for place, verdict in ((0, Verdict.VOID), (2, Verdict.HIT)):
        ahead = Follow(bench, place=place)
        ahead.launch()
        assert ahead.verdict() is verdict
        assert ahead.tokens == ([9, 12, 22] if place else [])


def test_no_more_of_a_chain_is_fed_than_has_room() -> None:
    bench = Bench(left=5)
    bench.publish([(2, 9)], [[12], [22], [32]], 7)
    assert bench.settle([4, 5, 6], [4, 5, 9, 1]).room == 1
    ahead = Follow(bench)
    ahead.launch()
    assert ahead.verdict() is Verdict.HIT
    assert ahead.tokens == [9, 12]


def test_after_a_miss_the_recovery_token_alone_is_fed() -> None:
    bench = Bench()
    bench.publish([(1, 9)], [[11]], 7)
    bench.settle([4, 5, 6], [4, 8, 9, 1])
    ahead = Follow(bench)
    ahead.launch()
    assert ahead.verdict() is Verdict.MISS
    assert ahead.tokens == [8]
    assert int(ahead.fed.starts) == 52
    assert [int(t) for t in (ahead.fed.budgets, ahead.fed.numbers)] == [0, 0]


@pytest.mark.parametrize("why", ["ended", "called off", "aborted", "another token"])
def test_a_glue_pass_that_nothing_follows_feeds_nothing(why: str) -> None:
    bench = Bench(left=3 if why == "ended" else 100)
    bench.publish([(2, 9)], [[12], [22]], 7)
    ahead = Follow(bench)
    if why == "called off":
        ahead.follower.call_off(7)
    elif why == "aborted":
        bench.records.abort()
    else:
        bench.settle([4, 5, 6], [4, 5, 9, 1])
        if why == "another token":
            bench.records.records[7, 0, rr.TOKEN] = VOCAB
    ahead.launch()
    assert ahead.verdict() is Verdict.VOID
    assert ahead.tokens == []
    assert [int(t) for t in (ahead.fed.budgets, ahead.fed.numbers)] == [0, 0]


def test_a_glue_pass_is_fed_what_the_host_gives() -> None:
    bench = Bench()
    pass_ = Follow(bench, Mode.GIVEN)
    pass_.launch()
    assert pass_.verdict() is None
    assert pass_.tokens == [9, 12]
    assert int(pass_.fed.starts) == 50
    assert pass_.fed.limits[0].tolist() == [K + 1 + i for i in range(K + 1)]
    assert [int(t) for t in (pass_.fed.numbers, pass_.fed.budgets)] == [7, 6]
    assert int(pass_.fed.hashes) % 2**64 == bench.prefix


def test_glue_passes_whose_input_was_loaded_are_left_alone() -> None:
    pass_ = Follow(Bench(), Mode.LOADED)
    pass_.launch()
    assert pass_.verdict() is None
    assert pass_.fed.tokens[0].tolist() == [99] * (K + 1)
    assert [int(t) for t in (pass_.fed.counts, pass_.fed.budgets)] == [6, 6]
