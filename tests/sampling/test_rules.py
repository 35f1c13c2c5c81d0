"""Single rounds of both rules: outcome distributions, greedy equivalence, edges."""

from typing import Literal

import numpy as np
import pytest
import torch

from ipc.messages.sampling import NoiseKey
from models.backends.base import SamplingKernels
from models.backends.native import NativeBackend
from models.native import NativeUnavailable
from ssd_pipe.errors import ConfigError
from ssd_pipe.sampling import draft_choice, noise, rejection, shared_noise
from ssd_pipe.sampling.filters import RowSampling
from tests.sampling.reference import P_VALUE, chi_square, target_probs

torch.set_num_threads(1)
SAMPLES = 10_000
VOCAB = 10
KEYS = [
    NoiseKey(0, 1.0),
    NoiseKey(0, 0.7, top_p=0.8),
    NoiseKey(0, 1.3, top_k=4),
    NoiseKey(0, 1.0, min_p=0.05),
    NoiseKey(0, 0.9, top_p=0.9, top_k=6, min_p=0.05),
]
GENERATOR = torch.Generator().manual_seed(20)
TARGET = torch.randn(VOCAB, generator=GENERATOR) * 1.5
DRAFT = TARGET + torch.randn(VOCAB, generator=GENERATOR)


def seeded(key: NoiseKey, offset: int = 0) -> list[NoiseKey]:
    return [
        NoiseKey(seed + offset, key.temperature, key.top_p, key.top_k, key.min_p)
        for seed in range(SAMPLES)
    ]


def first_tokens(outcomes: list[tuple[int, int]], chains: list[list[int]]) -> np.ndarray:
    first = [c[0] if k else t for (k, t), c in zip(outcomes, chains, strict=True)]
    return np.bincount(first, minlength=VOCAB)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_shared_noise_samples_the_target(key: NoiseKey) -> None:
    keys = seeded(key)
    sampling = RowSampling.from_keys(keys)
    tokens = shared_noise.choose(TARGET.expand(SAMPLES, -1), sampling, [5] * SAMPLES)
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert chi_square(counts, target_probs(TARGET.tolist(), key)) > P_VALUE


@pytest.mark.parametrize(
    ("key", "c"),
    [(k, 1.0) for k in KEYS] + [(KEYS[0], c) for c in (0.5, 0.2, 0.0)] + [(KEYS[4], 0.5)],
)
def test_rejection_samples_the_target(key: NoiseKey, c: float) -> None:
    keys = seeded(key, 10**6)
    tokens, q = draft_choice.propose(
        DRAFT.expand(SAMPLES, -1),
        RowSampling.from_keys(keys),
        [5] * SAMPLES,
        "rejection",
        [0] * SAMPLES,
        saguaro_c=c,
        fan_out=3,
    )
    assert q is not None
    drawn = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert chi_square(drawn, q[0].double().numpy() / q[0].double().sum().item()) > P_VALUE
    chains = [[t] for t in tokens.tolist()]
    logits = TARGET.expand(2 * SAMPLES, -1)
    outcomes = rejection.judge(logits, chains, keys, [5] * SAMPLES, [row[None] for row in q])
    probs = target_probs(TARGET.tolist(), key)
    assert chi_square(first_tokens(outcomes, chains), probs) > P_VALUE
    accepted = sum(k for k, _ in outcomes) / SAMPLES
    assert accepted == pytest.approx(np.minimum(probs, q[0].numpy()).sum(), abs=0.02)
    bonus = np.bincount([t for k, t in outcomes if k], minlength=VOCAB)
    assert bonus.sum() == 0 or chi_square(bonus, probs) > P_VALUE


@pytest.mark.parametrize("proposal", [0, 3, int(TARGET.argmax())])
@pytest.mark.parametrize("lost", [False, True])
def test_a_point_mass_or_lost_proposal_leaves_the_target(proposal: int, lost: bool) -> None:
    key = NoiseKey(0, 0.8, top_p=0.95)
    keys, chains = seeded(key, 5 * 10**6), [[proposal]] * SAMPLES
    outcomes = rejection.judge(
        TARGET.expand(2 * SAMPLES, -1),
        chains,
        keys,
        [3] * SAMPLES,
        [None] * SAMPLES,
        [lost] * SAMPLES,
    )
    probs = target_probs(TARGET.tolist(), key)
    assert chi_square(first_tokens(outcomes, chains), probs) > P_VALUE
    accepted = sum(k for k, _ in outcomes) / SAMPLES
    assert accepted == pytest.approx(0 if lost else probs[proposal], abs=0.02)


def test_equal_distributions_accept_everything() -> None:
    """p = q leaves an empty residual; it is not needed, and does no harm where rounding asks."""
    keys = seeded(NoiseKey(0, 1.0))[:500]
    q = torch.softmax(TARGET, dim=-1).expand(500, 1, -1)
    chains = [[int(t)] for t in torch.multinomial(q[:, 0], 1, generator=GENERATOR)[:, 0]]
    outcomes = rejection.judge(TARGET.expand(1000, -1), chains, keys, [0] * 500, list(q))
    assert all(k == 1 for k, _ in outcomes)
    impossible = torch.full((VOCAB,), float("-inf"))
    impossible[4] = 0.0  # p is a point mass on 4; a q above it everywhere leaves no residual
    sure = torch.full((1, VOCAB), 2.0)
    logits = torch.stack([impossible, impossible])
    assert rejection.judge(logits, [[3]], [NoiseKey(1, 1.0)], [0], [sure]) == [(0, 4)]


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
def test_greedy_rows_emit_the_argmax_among_sampled_ones(
    rule: Literal["shared_noise", "rejection"],
) -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(4)).bfloat16()
    best = logits.argmax(dim=-1).tolist()
    chains, keys, starts, want, row = [], [], [], [], 0
    for i in range(10):
        chain = best[row : row + 3]
        wrong = i % 4
        if wrong < 3:
            chain[wrong] = (chain[wrong] + 1) % VOCAB
        chains.append(chain)
        keys.append(NoiseKey(i, 0.0 if i % 3 else 1.0, top_k=2))
        starts.append(7 * i)
        want.append((wrong, best[row + wrong]))
        row += 4
    if rule == "shared_noise":
        got = shared_noise.judge(logits, chains, keys, starts)
    else:
        got = rejection.judge(logits, chains, keys, starts, [None] * 10, [True] * 10)
    assert [o for i, o in enumerate(got) if i % 3] == [o for i, o in enumerate(want) if i % 3]


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(2, 5000)
    logits[:, [77, 4000]] = 5.0
    assert shared_noise.judge(logits, [[77]], [NoiseKey()], [0]) == [(1, 77)]
    assert rejection.judge(logits, [[77]], [NoiseKey()], [0], [None]) == [(1, 77)]


def test_shared_noise_emits_the_same_text_whatever_is_proposed() -> None:
    generator = torch.Generator().manual_seed(8)
    table = torch.randn(VOCAB, VOCAB, generator=generator) * 2
    key = NoiseKey(99, 1.0, top_p=0.95)

    def generate(propose_length: int, salt: int) -> list[int]:
        rng, text = np.random.default_rng(salt), [0]
        while len(text) < 60:
            chain = rng.integers(0, VOCAB, propose_length).tolist()
            logits = table[[text[-1], *chain]]
            [(k, token)] = shared_noise.judge(logits, [chain], [key], [len(text)])
            text += [*chain[:k], token]
        return text[:60]

    reference = generate(0, 0)
    assert len(set(reference)) > 3
    assert all(generate(k, k) == reference for k in (1, 2, 5))


def test_empty_batches_are_empty() -> None:
    nothing = torch.zeros(0, VOCAB)
    assert shared_noise.judge(nothing, [], [], []) == []
    assert rejection.judge(nothing, [], [], [], []) == []


def test_saguaro_scales_the_top_and_renormalises() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.6, 0.4, 0.0, 0.0]])
    got = draft_choice.saguaro(probs, 2, 0.5)
    assert got[0].tolist() == pytest.approx([0.25 / 0.6, 0.15 / 0.6, 0.1 / 0.6, 0.1 / 0.6])
    assert torch.equal(draft_choice.saguaro(probs, 2, 1.0), probs)
    assert torch.equal(draft_choice.saguaro(probs, 0, 0.0), probs)
    assert draft_choice.saguaro(probs, 2, 0.0).tolist()[0] == pytest.approx([0, 0, 0.5, 0.5])
    assert torch.equal(draft_choice.saguaro(probs, 2, 0.0)[1], probs[1])
    with pytest.raises(ConfigError, match="saguaro_c"):
        draft_choice.saguaro(probs, 2, 1.5)


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
def test_an_exact_draft_ranks_the_true_recovery_first(
    rule: Literal["shared_noise", "rejection"],
) -> None:
    """With q = p the top fork is the target's own choice, or its own sample of p (bonus)."""
    keys = [NoiseKey(s, 0.0 if s % 5 == 0 else 0.9, top_k=6) for s in range(300)]
    sampling, n = RowSampling.from_keys(keys), len(keys)
    logits = torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(3))
    none = torch.full((n,), -1)
    tokens, _, _ = draft_choice.fork_candidates(logits, sampling, range(n), rule, none, [0] * n, 3)
    chains: list[list[int]] = [[]] * n
    if rule == "shared_noise":
        outcomes = shared_noise.judge(logits, chains, keys, list(range(n)))
    else:
        outcomes = rejection.judge(logits, chains, keys, list(range(n)), [None] * n)
    assert outcomes == [(0, t) for t in tokens[:, 0].tolist()]


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
@pytest.mark.parametrize("filtered", [False, True])
def test_candidates_are_the_best_scores_and_the_chain_token_has_its_own(
    rule: Literal["shared_noise", "rejection"], filtered: bool
) -> None:
    keys = [NoiseKey(s, 0.0 if s % 3 == 0 else 0.8, top_k=5 if filtered else 0) for s in range(60)]
    sampling, n = RowSampling.from_keys(keys), len(keys)
    logits = torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(8)) * 3
    chain = torch.arange(n) % VOCAB
    scores = draft_choice.fork_scores(logits, sampling, range(n), rule, [0] * n)
    for kernels in (None, *compiled()):
        tokens, values, own = draft_choice.fork_candidates(
            logits, sampling, range(n), rule, chain, [0] * n, 4, kernels
        )
        best = scores.topk(4)
        assert (tokens == best.indices.numpy()).all()
        assert values == pytest.approx(best.values.double().numpy(), abs=2e-5)
        expected = scores.gather(1, chain[:, None])[:, 0].double().numpy()
        assert own[np.isfinite(expected)] == pytest.approx(
            expected[np.isfinite(expected)], abs=2e-5
        )


@pytest.mark.parametrize("filtered", [False, True])
def test_compiled_choice_equals_torchs(filtered: bool) -> None:
    keys = [
        NoiseKey(s, 0.0 if s % 3 == 0 else 0.8, top_p=0.9 if filtered else 1) for s in range(90)
    ]
    sampling = RowSampling.from_keys(keys)
    logits = torch.randn(90, 5000, generator=torch.Generator().manual_seed(8)) * 3
    plain = shared_noise.choose(logits, sampling, range(90))
    for kernels in compiled():
        assert torch.equal(shared_noise.choose(logits, sampling, range(90), kernels), plain)


def compiled() -> list[SamplingKernels]:
    """This machine's compiled sampling, if its kernels can be built."""
    try:
        return [NativeBackend().sampling]
    except NativeUnavailable:
        return []


def test_the_rejection_rule_asks_for_offsets() -> None:
    sampling = RowSampling.from_keys([NoiseKey(0, 1.0)])
    with pytest.raises(ConfigError, match="offset"):
        draft_choice.propose(TARGET[None], sampling, [0], "rejection")
    assert noise.round_stream(noise.ACCEPT, 0) == noise.ACCEPT


def test_a_proposal_of_nothing_leaves_the_target_its_choice() -> None:
    """A draft's vocabulary of which nothing is allowed gives NaN for what it proposes."""
    p = torch.tensor([[0.0, 0.5, 0.5], [0.2, 0.8, 0.0]])
    weights = rejection._residual(p, [torch.full((3,), torch.nan), None])
    assert torch.equal(weights, p)
