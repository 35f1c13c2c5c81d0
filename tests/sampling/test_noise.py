import math

import numpy as np
import pytest
import torch
from scipy import stats

from ssd_pipe.sampling import noise

torch.set_num_threads(1)
MASK = 2**64 - 1


def finalise(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & MASK
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def row_key(seed: int, position: int, stream: int) -> int:
    """``noise.row_keys`` of one row, in exact integers."""
    z = 0
    for word in (seed, position, stream):
        z = finalise(z + (word + 1) * 0x9E3779B97F4A7C15 & MASK)
    return z


def by_definition(key: int, token: int) -> float:
    z = finalise((key + (token + 1) * 0x9E3779B97F4A7C15) & MASK)
    u = (np.float32(z >> 32) + np.float32(0.5)) * np.float32(2.0**-32)
    u = min(float(u), 1 - 2.0**-24)
    return -math.log(-math.log1p(-u))


def test_gumbel_is_the_documented_function() -> None:
    keys = [row_key(s, p, 0) for s, p in ((0, 0), (1, 7), (2**63 - 1, 4000), (5, 2**40))]
    vocab = 70_000  # a row fills more than a block
    got = noise.gumbel(noise.keys_to_tensor(np.array(keys, np.uint64)), vocab)
    for row, key in enumerate(keys):
        for token in [0, 1, 2, 777, vocab - 1, *range(3000, 3200)]:
            assert got[row, token].item() == pytest.approx(by_definition(key, token), abs=4e-6)


def test_row_keys_equal_those_in_exact_integers() -> None:
    seeds = [0, 1, 2**62 + 3, 2**63 - 1]
    positions = [0, 5, 4095, 2**31]
    for stream in (noise.SHARED, noise.RESIDUAL, noise.ACCEPT, 4097):
        many = noise.row_keys(seeds, positions, stream)
        one = [row_key(s, p, stream) for s, p in zip(seeds, positions, strict=True)]
        assert many.tolist() == one
    signed = noise.keys_to_tensor(many)
    assert [k & MASK for k in signed.tolist()] == one


def test_row_keys_do_not_collide() -> None:
    seeds, positions = np.meshgrid(np.arange(100), np.arange(1000))
    keys = [noise.row_keys(seeds.ravel(), positions.ravel(), s) for s in range(6)]
    assert len(np.unique(np.concatenate(keys))) == 600_000


def test_gumbel_at_and_sparse_sums_equal_the_whole_row() -> None:
    keys = noise.keys_to_tensor(noise.row_keys([3, 4], [1, 2], 0))
    whole = noise.gumbel(keys, 1000)
    tokens = torch.tensor([[0, 17, 999], [5, 5, 500]])
    assert torch.equal(noise.gumbel_at(keys[:, None], tokens), whole.gather(1, tokens))
    scores = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)) * 8
    floor = scores.amax(1, keepdim=True) - 9
    sparse = noise.add_gumbel(scores, keys, floor)
    assert int(torch.isinf(sparse).sum()) > 1000
    assert torch.equal(sparse[scores >= floor], (scores + whole)[scores >= floor])


@pytest.mark.parametrize("spread", [0.5, 3.0, 20.0, 1e6])
def test_pruned_argmax_equals_the_dense_one(spread: float) -> None:
    keys = noise.keys_to_tensor(noise.row_keys(np.arange(200), 9, 0))
    scores = torch.randn(200, 3000, generator=torch.Generator().manual_seed(1)) * spread
    dense = (scores + noise.gumbel(keys, 3000)).argmax(dim=-1)
    assert torch.equal(noise.gumbel_argmax(scores, keys), dense)


def test_noise_is_gumbel_within_its_bounds() -> None:
    keys = noise.keys_to_tensor(noise.row_keys(np.arange(50), 3, 0))
    g = noise.gumbel(keys, 20_000).double().numpy()
    assert stats.kstest(g.ravel(), "gumbel_r").pvalue > 1e-4
    low = -math.log(-math.log1p(-(1 - 2.0**-24)))
    high = -math.log(-math.log1p(-(2.0**-33)))
    assert -2.82 <= low <= g.min()
    assert g.max() <= high <= noise.GUMBEL_MAX


def test_uniforms_are_uniform_and_inside_the_open_interval() -> None:
    keys = noise.row_keys(np.arange(20_000), 11, noise.ACCEPT)
    u = noise.uniforms(keys)
    assert u[:100].tolist() == [((finalise(k) >> 12) + 0.5) * 2.0**-52 for k in keys[:100].tolist()]
    assert u.min() > 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-4


def test_noise_is_independent_across_seeds_positions_and_streams() -> None:
    rows = [(s, p, t) for s in range(5) for p in range(4) for t in (0, 1, 2, 4, 5)]
    seeds, positions, streams = (np.array(column) for column in zip(*rows, strict=True))
    g = noise.gumbel(noise.keys_to_tensor(noise.row_keys(seeds, positions, streams)), 20_000)
    corr = np.corrcoef(g.double().numpy())
    off = corr[~np.eye(len(rows), dtype=bool)]
    # the largest of 4,950 pairs of a normal with deviation 1/sqrt(20,000) is about 3.9 of them
    assert np.abs(off).max() < 5.5 / math.sqrt(20_000)
    assert stats.kstest(off * math.sqrt(20_000), "norm").statistic < 0.03
