"""Bias, penalties, min_tokens: exact distributions at each place of a chain, and the odd cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ipc.messages.sampling import NoiseKey, Processors
from ssd_pipe.sampling import draft_choice, rejection, shared_noise
from ssd_pipe.sampling.edits import unpack_bits
from ssd_pipe.sampling.filters import RowSampling
from ssd_pipe.sampling.logprobs import token_logprobs
from ssd_pipe.sampling.processors import (
    Place,
    SequenceRules,
    TrackedRules,
    chain_places,
    processed,
)
from tests.sampling.reference import P_VALUE, chi_square, target_probs

torch.set_num_threads(1)
SAMPLES = 10_000
VOCAB = 8
PROMPT, OUTPUT = [1, 2, 2, 5], [3, 3, 2, 7]
GENERATOR = torch.Generator().manual_seed(4)
TARGET = torch.randn(VOCAB, generator=GENERATOR) * 1.5
DRAFT = TARGET + torch.randn(VOCAB, generator=GENERATOR)
CASES = {
    "repetition": Processors(4, repetition_penalty=1.6),
    "presence+frequency": Processors(4, presence_penalty=0.8, frequency_penalty=0.5),
    "bias": Processors(4, logit_bias=((0, 1.5), (6, -100.0))),
    "min_tokens": Processors(4, min_tokens=6, stop_ids=(0, 4)),
    "allowed": Processors(4, allowed=(1, 3, 6)),
    "bad": Processors(4, bad=((5,), (3, 1), (2, 7, 3), (7, 3, 1, 1, 6), (2, 5, 3, 3))),
    "all": Processors(4, 1.4, -0.6, 0.4, ((1, 1.0), (3, 2.0)), 5, (0, 4)),
}
SHAPES = [NoiseKey(0, 1.0), NoiseKey(0, 0.8, top_p=0.9, top_k=6, min_p=0.02)]


def rules_of(settings: Processors, output: list[int] = OUTPUT) -> SequenceRules:
    rules = SequenceRules(settings, None)
    rules.commit([*PROMPT, *output])
    return rules


def exact(logits: torch.Tensor, settings: Processors, output: list[int]) -> list[float]:
    """Processed logits, one at a time."""
    bias = dict(settings.logit_bias)
    changed = []
    for token, logit in enumerate(logits.tolist()):
        x = logit + bias.get(token, 0.0)
        if token in settings.stop_ids and len(output) < settings.min_tokens:
            x = -math.inf
        if settings.allowed and token not in settings.allowed:
            x = -math.inf
        for word in settings.bad:
            if tuple([*output, token][-len(word) :]) == word:
                x = -math.inf
        if token in PROMPT + output:
            x = x / settings.repetition_penalty if x > 0 else x * settings.repetition_penalty
        x -= settings.frequency_penalty * output.count(token)
        x -= settings.presence_penalty * (token in output)
        changed.append(x)
    return changed


def seeded(shape: NoiseKey, offset: int) -> list[NoiseKey]:
    return [
        NoiseKey(offset + i, shape.temperature, shape.top_p, shape.top_k, shape.min_p)
        for i in range(SAMPLES)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_shared_noise_samples_the_processed_target_at_each_place(
    name: str, shape: NoiseKey
) -> None:
    settings = CASES[name]
    rules = rules_of(settings)
    chain = [3, 1, 1]
    for i in range(len(chain) + 1):
        one = processed(TARGET[None], [Place(0, rules, chain[:i])])
        keys = RowSampling.from_keys(seeded(shape, i * SAMPLES))
        tokens = shared_noise.choose(one.expand(SAMPLES, -1), keys, [9 + i] * SAMPLES)
        counts = np.bincount(tokens.numpy(), minlength=VOCAB)
        probs = target_probs(exact(TARGET, settings, OUTPUT + chain[:i]), shape)
        assert chi_square(counts, probs) > P_VALUE


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_rejection_samples_the_processed_target(name: str, shape: NoiseKey) -> None:
    """A chain of two, each proposal drawn from the processed draft that saw the one before."""
    settings = CASES[name]
    rules = rules_of(settings)
    keys = seeded(shape, 10**7)
    sampling = RowSampling.from_keys(keys)
    chains: list[list[int]] = [[] for _ in keys]
    qs = []
    for i in range(2):
        places = [Place(row, rules, chain) for row, chain in enumerate(chains)]
        logits = processed(DRAFT.expand(SAMPLES, -1), places)
        tokens, q = draft_choice.propose(
            logits, sampling, [8 + i] * SAMPLES, "rejection", [i] * SAMPLES
        )
        assert q is not None
        qs.append(q)
        chains = [[*chain, t] for chain, t in zip(chains, tokens.tolist(), strict=True)]
    places = [p for n, chain in enumerate(chains) for p in chain_places(3 * n, rules, chain)]
    logits = processed(TARGET.expand(3 * SAMPLES, -1), places)
    outcomes = rejection.judge(logits, chains, keys, [8] * SAMPLES, list(torch.stack(qs, dim=1)))
    emitted = [[*c[:k], t] for (k, t), c in zip(outcomes, chains, strict=True)]
    first = np.bincount([tokens[0] for tokens in emitted], minlength=VOCAB)
    probs = target_probs(exact(TARGET, settings, OUTPUT), shape)
    assert chi_square(first, probs) > P_VALUE
    likely = int(first.argmax())
    second = [tokens[1] for tokens in emitted if len(tokens) > 1 and tokens[0] == likely]
    assert len(second) > 500
    probs = target_probs(exact(TARGET, settings, [*OUTPUT, likely]), shape)
    assert chi_square(np.bincount(second, minlength=VOCAB), probs) > P_VALUE


def test_nothing_but_the_places_changes_and_the_argument_stays() -> None:
    logits = torch.randn(4, 50, generator=GENERATOR)
    before = logits.clone()
    out = processed(logits, [Place(2, rules_of(CASES["all"], OUTPUT[:2]), [9])])
    assert torch.equal(logits, before)
    assert torch.equal(out[[0, 1, 3]], before[[0, 1, 3]])
    touched = (out[2] != before[2]).nonzero().squeeze(1).tolist()
    assert touched == [0, 1, 2, 3, 4, 5, 9]  # prompt, output, suffix, biased, stop ids


def test_ids_beyond_a_cut_vocabulary_are_left_out() -> None:
    settings = Processors(0, 1.5, 0.5, 0.5, ((2, 1.0), (40, 3.0)), 9, (3, 41))
    rules = SequenceRules(settings, None)
    rules.commit([1, 42])
    whole = torch.randn(1, 50, generator=GENERATOR)
    cut = processed(whole[:, :10], [Place(0, rules, [44, 4])])
    assert torch.equal(cut, processed(whole, [Place(0, rules, [44, 4])])[:, :10])


def test_of_a_cut_vocabulary_without_any_allowed_id_all_is_left() -> None:
    rules = SequenceRules(Processors(0, allowed=(20, 30)), None)
    whole = torch.randn(1, 50, generator=GENERATOR)
    assert torch.equal(processed(whole[:, :10], [Place(0, rules, [])]), whole[:, :10])
    out = processed(whole, [Place(0, rules, [])])
    assert out.isfinite().nonzero()[:, 1].tolist() == [20, 30]


def test_before_min_tokens_no_allowed_id_that_ends_the_text_keeps_all_others_out() -> None:
    """Of a cut vocabulary all are left then, as where no allowed id is in it."""
    settings = Processors(0, min_tokens=3, stop_ids=(2,), allowed=(2, 30))
    rules = SequenceRules(settings, None)
    whole = torch.randn(1, 50, generator=GENERATOR)
    cut = processed(whole[:, :10], [Place(0, rules, [])])
    assert cut.isfinite().sum() == 9
    assert processed(whole, [Place(0, rules, [])]).isfinite().nonzero()[:, 1].tolist() == [30]
    rules.commit([30, 30, 30])
    out = processed(whole[:, :10], [Place(0, rules, [])])
    assert out.isfinite().nonzero()[:, 1].tolist() == [2]


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4], [4], [2, 4], [3]])
def test_a_bad_word_is_seen_however_its_tokens_are_committed(cuts: list[int]) -> None:
    rules = SequenceRules(Processors(1, bad=((4, 5, 6, 7), (9,))), None)
    tokens, start = [6, 3, 4, 5, 6], 0  # the first is the prompt's
    for end in [0, *cuts]:
        rules.commit(tokens[start : end + 1])
        start = end + 1
    out = processed(torch.zeros(1, 10), [Place(0, rules, tokens[start:])])
    assert (~out[0].isfinite()).nonzero().squeeze(1).tolist() == [7, 9]


class Masks:
    """A grammar that allows the ids it was made with."""

    failure = ""

    def __init__(self, allowed: list[int]) -> None:
        self._bits = sum(1 << token for token in allowed).to_bytes(8, "little")

    def mask(self, suffix: list[int]) -> bytes:
        return self._bits


@pytest.mark.parametrize("vocab", [16, 20, 23, 24])
@pytest.mark.parametrize("allowed", [[0], [2, 9, 15], [19, 20, 22], [23], [40]])
def test_masks_apply_bit_by_bit_and_one_that_leaves_nothing_not_at_all(
    allowed: list[int], vocab: int
) -> None:
    rules = SequenceRules(Processors(), None)
    rules.grammar = Masks(allowed)  # type: ignore[assignment]
    out = processed(torch.zeros(3, vocab), [Place(2, rules, []), Place(0, rules, [3])])
    inside = [token for token in allowed if token < vocab] or list(range(vocab))
    assert out[1].isfinite().all()
    for row in (0, 2):
        assert out[row].isfinite().nonzero().squeeze(1).tolist() == inside


def test_bits_unpack_on_a_device_as_they_do_in_numpy() -> None:
    packed = np.random.default_rng(0).integers(0, 256, (5, 7), np.uint8)
    wanted = np.unpackbits(packed, axis=1, count=53, bitorder="little").astype(bool)
    assert np.array_equal(unpack_bits(torch.from_numpy(packed), 53).numpy(), wanted)


def test_feeding_takes_back_what_was_not_accepted() -> None:
    settings = Processors(2, frequency_penalty=1.0)
    tracked = TrackedRules(settings, None, [5])
    tracked.feed(1, [6], 0)  # the prompt's rest
    tracked.feed(2, [7, 1, 2, 3], 3)  # 1 is accepted, then comes 4
    tracked.feed(4, [4, 2, 2], 2)
    assert tracked.rules.length == 5
    out = processed(torch.zeros(1, 8), [Place(0, tracked.rules, [])])
    assert out[0].tolist() == [0, -1, 0, 0, -1, 0, 0, -1]


def test_more_distinct_tokens_than_the_first_allocation() -> None:
    settings = Processors(3, frequency_penalty=1.0)
    rules = SequenceRules(settings, None)
    output = [t % 300 for t in range(700)]
    for at in range(0, 700, 7):
        rules.commit(([0, 1, 2] if at == 0 else []) + output[at : at + 7])
    out = processed(torch.zeros(1, 400), [Place(0, rules, [399, 0, 0])])
    counts = np.bincount([*output, 399, 0, 0], minlength=400)
    assert out[0].tolist() == (-counts).tolist()


def test_logprobs_of_bfloat16_logits() -> None:
    logits = (torch.randn(3, 100, generator=GENERATOR) * 4).bfloat16()
    got = token_logprobs(logits, [5, 50, 99], [0, 2, 100])
    expected = torch.log_softmax(logits.double(), dim=-1)
    for entry, row, token, count in zip(got, expected, (5, 50, 99), (0, 2, 100), strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())
        assert len(entry.top_ids) == count
        assert entry.top_logprobs == pytest.approx(
            row.sort(descending=True).values[:count].tolist(), abs=1e-4
        )
    assert token_logprobs(logits[:0], [], []) == []
