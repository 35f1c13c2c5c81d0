"""Temperature, min-p, top-k and top-p, applied row by row to a batch of logits.

The order is that of vLLM's v1 sampler: temperature, then min-p, then top-k, then top-p on what is
left, renormalised. min-p compares with the most likely token, so it commutes with top-k. Tokens
are ranked by logit, the lower id first on ties; the kept set is always a prefix of that ranking,
so top_k = 1 is the greedy choice and bf16 ties cannot depend on a sort's whims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ipc.messages.sampling import GREEDY_BELOW, NoiseKey
from ssd_pipe.sampling.noise import keys_to_tensor, row_keys

_NUCLEUS_GUESS = 256  # tokens ranked first for top-p; enough unless the row is flat


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling settings of N rows of logits, as numpy arrays [N].

    Attributes:
        seeds: uint64 noise seeds.
        temperature: float32; 1 on greedy rows.
        top_p: float64 in (0, 1], 1 = off.
        top_k: int64, 0 = off.
        min_p: float64 in [0, 1], 0 = off.
        greedy: bool; such rows ignore every filter and all noise.
    """

    seeds: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    greedy: np.ndarray

    @classmethod
    def from_keys(
        cls, keys: Sequence[NoiseKey], counts: Sequence[int] | None = None
    ) -> RowSampling:
        """One row a key, or ``counts[i]`` rows of ``keys[i]``."""
        temperature = np.array([k.temperature for k in keys], np.float64)
        greedy = temperature < GREEDY_BELOW
        one = cls(
            seeds=np.array([k.seed for k in keys], np.uint64),
            temperature=np.where(greedy, 1.0, temperature).astype(np.float32),
            top_p=np.array([k.top_p for k in keys], np.float64),
            top_k=np.array([k.top_k for k in keys], np.int64),
            min_p=np.array([k.min_p for k in keys], np.float64),
            greedy=greedy,
        )
        return one if counts is None else one.take(np.repeat(np.arange(len(keys)), counts))

    def take(self, rows: np.ndarray) -> RowSampling:
        """The settings of the given rows (indices or a mask), in that order."""
        return RowSampling(
            self.seeds[rows],
            self.temperature[rows],
            self.top_p[rows],
            self.top_k[rows],
            self.min_p[rows],
            self.greedy[rows],
        )

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def unfiltered(self) -> bool:
        """No row drops tokens: temperature and noise alone decide."""
        plain = (self.top_p >= 1) & (self.top_k == 0) & (self.min_p == 0)
        return bool((plain | self.greedy).all())

    def inverse_temperature(self) -> torch.Tensor:
        """float32 [N] on the CPU, 0 on greedy rows: how kernels take temperatures."""
        return torch.from_numpy(np.where(self.greedy, 0, 1 / self.temperature).astype(np.float32))

    def noise_keys(
        self,
        positions: Sequence[int] | np.ndarray,
        streams: int | np.ndarray,
        device: torch.device,
    ) -> torch.Tensor:
        """int64 [N] row keys at ``positions``, one stream or one a row (see ``noise``)."""
        return keys_to_tensor(row_keys(self.seeds, positions, streams), device)


def filtered_logits(logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    """Tempered logits, -inf where a filter drops the token: [N, V] -> float32 [N, V].

    Greedy rows come back as they are. May return ``logits`` itself; never changes it.
    """
    scaled = logits.float()
    if bool(np.any(sampling.temperature != 1)):
        scaled = scaled / torch.from_numpy(sampling.temperature).to(logits.device)[:, None]
    vocab = logits.shape[1]
    ranked = (sampling.top_p < 1) | ((sampling.top_k > 0) & (sampling.top_k < vocab))
    busy = np.flatnonzero((ranked | (sampling.min_p > 0)) & ~sampling.greedy)
    if busy.size == 0:
        return scaled
    if scaled.data_ptr() == logits.data_ptr():
        scaled = scaled.clone()
    index = torch.from_numpy(busy).to(logits.device)
    rows = scaled if busy.size == len(sampling) else scaled[index]
    rows = _drop_unlikely(rows, sampling.min_p[busy])
    sub = np.flatnonzero(ranked[busy])
    if sub.size:
        some = sampling.take(busy[sub])
        if sub.size == busy.size:
            rows = _keep_top(rows, some.top_k, some.top_p)
        else:
            sub_index = torch.from_numpy(sub).to(logits.device)
            rows[sub_index] = _keep_top(rows[sub_index], some.top_k, some.top_p)
    if rows is not scaled:
        scaled[index] = rows
    return scaled


def _drop_unlikely(x: torch.Tensor, min_p: np.ndarray) -> torch.Tensor:
    """min-p on float32 [R, V]; changes and returns ``x``."""
    if not np.any(min_p > 0):
        return x
    with np.errstate(divide="ignore"):
        bound = torch.from_numpy(np.log(min_p).astype(np.float32)).to(x.device)
    return x.masked_fill_(x < x.amax(dim=-1, keepdim=True) + bound[:, None], float("-inf"))


def _keep_top(x: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray) -> torch.Tensor:
    """top-k, then top-p, on float32 [R, V]; changes and returns ``x``."""
    vocab = x.shape[1]
    limited = top_k > 0
    k = np.where(limited, np.minimum(top_k, vocab), vocab)
    width = min(vocab, int(np.where(limited, k, _NUCLEUS_GUESS).max()))
    count, last, short = _prefix(x, _ranked(x, width), k, top_p)
    flat = short.nonzero().squeeze(1)
    if flat.numel():
        part, chosen = x[flat], flat.cpu().numpy()
        count[flat], last[flat], _ = _prefix(part, _ranked(part, vocab), k[chosen], top_p[chosen])
    keep = x >= last
    excess = torch.count_nonzero(keep, dim=-1) - count
    if bool((excess > 0).any()):
        tied = x == last
        # of the tokens tied with the last one kept, the lower ids stay
        allowed = torch.count_nonzero(tied, dim=-1) - excess
        keep &= ~tied | (tied.cumsum(dim=-1) <= allowed[:, None])
    return x.masked_fill_(~keep, float("-inf"))


def _ranked(x: torch.Tensor, width: int) -> torch.Tensor:
    """The ``width`` largest values of each row of float32 [R, V], falling."""
    if width <= _NUCLEUS_GUESS or x.device.type != "cpu":
        return torch.topk(x, width, dim=-1).values
    # numpy's vectorised sort is several times faster here than torch's, which carries indices
    falling = np.sort(x.numpy(), axis=-1)[:, : -width - 1 : -1]
    return torch.from_numpy(np.ascontiguousarray(falling))


def _prefix(
    x: torch.Tensor, values: torch.Tensor, k: np.ndarray, top_p: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How much of the ranked ``values`` [R, W] of ``x`` [R, V] each row keeps.

    Returns the number of tokens int64 [R], the last value kept float32 [R, 1], and bool [R]: W
    values were too few to tell.
    """
    vocab, width = x.shape[1], values.shape[1]
    peak = values[:, :1]
    limit = torch.from_numpy(k).to(x.device)[:, None]
    inside = torch.arange(width, device=x.device) < limit
    mass = (values - peak).exp_().double() * inside
    total = mass.sum(dim=-1, keepdim=True)
    if width < vocab and bool((k == vocab).any()):
        everything = (x - peak).exp_().sum(dim=-1, dtype=torch.float64, keepdim=True)
        total = torch.where(limit == vocab, everything, total)
    nucleus = torch.from_numpy(np.where(top_p < 1, top_p, np.inf)).to(x.device)[:, None]
    reached = mass.cumsum(dim=-1)
    count = (inside & (reached - mass < nucleus * total)).sum(dim=-1).clamp_(min=1)
    short = (reached[:, -1] < (nucleus * total)[:, 0]) & (limit[:, 0] > width)
    return count, values.gather(1, count[:, None] - 1), short
