"""The sampling kernels pass most tokens over; their choice is that of scoring every token."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from models.backends.native import NativeBackend
from models.native.sampling import gumbel_rows, head_argmax, noised_argmax, noised_topk

INF = float("inf")
VOCABS = [1, 2, 7, 8, 31, 32, 33, 63, 257, 4099]
ROWS = 9


def random_keys(rng: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=rng)


def ranking(
    logits: torch.Tensor, inverse: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All scores, highest first, with their ids; id -1 and -inf where there is no score."""
    noised = logits * inverse[:, None] + gumbel_rows(keys, logits.shape[1])
    scores = torch.where((inverse == 0)[:, None], logits, noised)
    scores = torch.where(scores.isnan(), -INF, scores)
    values, ids = torch.sort(scores, descending=True, stable=True)
    return values, torch.where(values > -INF, ids, -1)


def check(logits: torch.Tensor, inverse: torch.Tensor, keys: torch.Tensor) -> None:
    vocab = logits.shape[1]
    values, ids = ranking(logits, inverse, keys)
    got, index = noised_argmax(logits, inverse, keys)
    assert torch.equal(got, values[:, 0])
    assert torch.equal(index, ids[:, 0].clamp(min=0))
    for count in (1, 3, 8, 9, 63, 64):
        reach = min(count, vocab)
        top, top_ids = noised_topk(logits, count, inverse, keys)
        assert torch.equal(top[:, :reach], values[:, :reach])
        assert torch.equal(top_ids[:, :reach], ids[:, :reach])
        assert (top[:, reach:] == -INF).all()
        assert (top_ids[:, reach:] == -1).all()


def flat(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    return torch.full(shape, 0.25)


def spread(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=rng) * 3


def peaked(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    """The peaks just within and just out of reach of the noise of the others."""
    logits = torch.randn(shape, generator=rng)
    at = torch.randint(0, shape[1], (shape[0], 1), generator=rng)
    return logits.scatter(1, at, torch.linspace(5, 40, shape[0])[:, None])


def rising(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    return torch.linspace(-8, 8, shape[1]).expand(shape).contiguous()


def tied(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    """At small temperatures and on greedy rows, ties of many."""
    return torch.randn(shape, generator=rng).round() * 2**20


def lonely(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    """-inf but for one token; row 0 -inf throughout."""
    logits = torch.full(shape, -INF)
    at = torch.randint(0, shape[1], (shape[0], 1), generator=rng)
    logits.scatter_(1, at, torch.randn(shape[0], 1, generator=rng) * 1e4)
    logits[0] = -INF
    return logits


def broken(shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    """NaN, both infinities, and numbers whose scores overflow."""
    logits = torch.randn(shape, generator=rng) * 1e38
    kind = torch.rand(shape, generator=rng)
    logits[kind < 0.3] = float("nan")
    logits[(kind > 0.3) & (kind < 0.6)] = -INF
    logits[kind > 0.999] = INF
    return logits


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("make", [flat, spread, peaked, rising, tied, lonely, broken])
def test_choice_is_that_of_all_scores(
    rng: torch.Generator,
    make: Callable[[tuple[int, int], torch.Generator], torch.Tensor],
    vocab: int,
) -> None:
    logits = make((ROWS, vocab), rng)
    for scale in (1e-30, 1e-3, 0.3, 1.0, 1.7, 50.0, 1e30):
        inverse = torch.full((ROWS,), scale)
        inverse[4] = 0
        check(logits, inverse, random_keys(rng, ROWS))


@pytest.mark.parametrize("level", [0.0, -1.5, 20.0, -3e3, 1e6])
def test_scores_that_differ_by_rounding_alone(rng: torch.Generator, level: float) -> None:
    """Every token's noise lifts it to the same level: each is as near the floor as can be."""
    keys = random_keys(rng, 24)
    logits = level - gumbel_rows(keys, 5003)
    check(logits, torch.ones(24), keys)
    below = torch.where(torch.rand(logits.shape, generator=rng) < 0.9, logits - 1e-3, logits)
    check(below, torch.ones(24), keys)


def test_rare_large_noise_is_found(rng: torch.Generator) -> None:
    """Rows with noise far above the usual win over peaks that stand just below it."""
    keys = random_keys(rng, 20)
    noise = gumbel_rows(keys, 50_000)
    best, at = noise[:, 1:].max(-1)
    logits = torch.zeros(20, 50_000)
    logits[:, 0] = best - noise[:, 0]
    for step, winner in ((-1e-5, at + 1), (1e-5, torch.zeros_like(at))):
        shifted = logits.clone()
        shifted[:, 0] += step
        assert torch.equal(noised_argmax(shifted, torch.ones(20), keys)[1], winner)
        check(shifted, torch.ones(20), keys)


@pytest.mark.parametrize(
    ("key", "token", "doublings"),
    [
        (10592, 35546, 17),
        (27278, 3179, 16),
        (27432, 20403, 16),
        (47991, 30204, 15),
        (57321, 45583, 33),
        (77015, 17087, 15),
    ],
)
def test_noise_at_which_the_bound_on_hashes_is_tightest(
    key: int, token: int, doublings: int
) -> None:
    """Large noise of nearly a multiple of log 2 that lifts its token just above all others."""
    keys = torch.tensor([key])
    noise = gumbel_rows(keys, token + 1)
    assert noise[0, token] == pytest.approx(doublings * math.log(2), abs=3e-5)
    logits = torch.full((1, token + 1), -INF)
    logits[0, :70] = -noise[0, :70]
    logits[0, token] = 2e-6 - noise[0, token]
    assert noised_argmax(logits, torch.ones(1), keys)[1].item() == token
    check(logits, torch.ones(1), keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 15, 16, 33, 1000, 4099])
def test_fused_head_chooses_by_all_scores(
    rng: torch.Generator, dtype: torch.dtype, vocab: int
) -> None:
    backend = NativeBackend()
    packed = backend.pack((torch.randn(vocab, 24, generator=rng)).to(dtype))
    for m in (1, 2, 3, 5, 6, 8, 19):
        x = torch.randn(m, 24, generator=rng)
        logits = backend.linear(x, packed, None)
        keys = random_keys(rng, m)
        for scale in (0.0, 1e-20, 0.2, 1.0, 30.0):
            inverse = torch.full((m,), scale)
            inverse[m // 2] = 0.7
            for threads in (1, 2):
                torch.set_num_threads(threads)
                got, index = head_argmax(x, packed, inverse, keys)
                values, ids = ranking(logits, inverse, keys)
                assert torch.equal(got, values[:, 0])
                assert torch.equal(index, ids[:, 0])


def test_noised_ties_over_panels_and_threads_go_to_the_lowest_id(rng: torch.Generator) -> None:
    """Scores so large that the noise is rounded away."""
    packed = NativeBackend().pack(torch.ones(400, 8))
    x, inverse, keys = torch.full((7, 8), 1e6), torch.full((7,), 1e4), random_keys(rng, 7)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert head_argmax(x, packed, inverse, keys)[1].tolist() == [0] * 7
    logits = torch.full((7, 400), 8e6)
    assert noised_topk(logits, 64, inverse, keys)[1].tolist() == [list(range(64))] * 7
