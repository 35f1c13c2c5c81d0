import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.messages.sampling import NoiseKey
from ssd_pipe.sampling.filters import RowSampling, filtered_logits
from tests.sampling.reference import kept_tokens

torch.set_num_threads(1)

# quarters have exact float32 quotients by these temperatures, so that ties stay ties
LOGIT = st.integers(-24, 24).map(lambda n: n / 4)
KEY = st.builds(
    NoiseKey,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.97, 0.83, 0.51, 0.23, 1e-6]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 1000]),
    min_p=st.sampled_from([0.0, 0.031, 0.37, 1.0]),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[NoiseKey]]:
    vocab = draw(st.integers(1, 12))
    rows = draw(st.integers(1, 5))
    row = st.lists(LOGIT, min_size=vocab, max_size=vocab)
    return draw(st.lists(row, min_size=rows, max_size=rows)), [draw(KEY) for _ in range(rows)]


@settings(deadline=None, max_examples=200)
@given(batches())
def test_filters_equal_the_plain_reference(
    batch: tuple[list[list[float]], list[NoiseKey]],
) -> None:
    rows, keys = batch
    logits = torch.tensor(rows)
    got = filtered_logits(logits, RowSampling.from_keys(keys))
    assert logits.tolist() == rows
    for row, key, out in zip(rows, keys, got.tolist(), strict=True):
        if key.temperature == 0:
            assert out == row
            continue
        kept = [t for t, x in enumerate(out) if not math.isinf(x)]
        assert kept == kept_tokens(row, key)
        assert all(out[t] == row[t] / key.temperature for t in kept)


def test_a_flat_nucleus_wider_than_the_first_guess() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(3, 3000, generator=generator) * 0.3
    flat[1, 40] = 30.0  # peaked row among flat ones
    keys = [NoiseKey(0, 1.0, 0.9), NoiseKey(0, 1.0, 0.9), NoiseKey(0, 0.7, 0.6, 2000)]
    got = filtered_logits(flat, RowSampling.from_keys(keys))
    for row, key, out in zip(flat.double().tolist(), keys, got, strict=True):
        kept = torch.isfinite(out).nonzero().squeeze(1).tolist()
        assert kept == kept_tokens(row, key)
    assert torch.isfinite(got).sum(dim=1).tolist()[1] == 1


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(2)).bfloat16() * 3
    keys = [
        NoiseKey(1, 0.8, 0.95),
        NoiseKey(2, 1.0, 0.9, 700, 0.01),
        NoiseKey(3),
        NoiseKey(4, 1.3),
    ]
    together = filtered_logits(logits, RowSampling.from_keys(keys))
    for i, key in enumerate(keys):
        alone = filtered_logits(logits[i : i + 1], RowSampling.from_keys([key]))
        assert torch.equal(alone[0], together[i])


def test_top_k_one_is_greedy_on_tied_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    got = filtered_logits(logits, RowSampling.from_keys([NoiseKey(0, 1.0, top_k=1)]))
    assert torch.isfinite(got).tolist() == [[False, True, False, False, False]]


def test_unfiltered_rows_are_not_copied_and_repeats_follow_counts() -> None:
    logits = torch.randn(3, 8)
    plain = RowSampling.from_keys([NoiseKey(1, 1.0), NoiseKey(2)], [2, 1])
    assert filtered_logits(logits, plain).data_ptr() == logits.data_ptr()
    assert plain.seeds.tolist() == [1, 1, 2]
    assert plain.greedy.tolist() == [False, False, True]


def test_a_tiny_temperature_is_greedy() -> None:
    sampling = RowSampling.from_keys([NoiseKey(0, 1e-6), NoiseKey(0, 1e-4)])
    assert sampling.greedy.tolist() == [True, False]
    got = filtered_logits(torch.tensor([[1e3, -1e3]] * 2), sampling)
    assert bool(np.isfinite(got.numpy()).all())
