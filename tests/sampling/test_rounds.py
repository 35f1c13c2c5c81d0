"""Whole speculative rounds: the joint distribution of what they emit is the target's.

Ten thousand sequences of a Markov target are decoded with a different Markov draft. Each round
forks on its likeliest outcomes (so what is cached depends on the noise), judges its chain, and
takes the next chain from the cache or, on a miss, from a backup. Chains stop early and lose their
distributions at random.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from ipc.messages.sampling import NoiseKey
from ssd_pipe.config import Rule
from ssd_pipe.sampling import draft_choice, rejection, shared_noise
from ssd_pipe.sampling.filters import RowSampling
from tests.sampling.reference import P_VALUE, chi_square, target_probs

torch.set_num_threads(1)
SEQUENCES = 10_000
K = 2
EMIT = 3


@dataclass
class Case:
    rule: Rule
    backup: str
    vocab: int = 5
    c: float = 1.0
    key: NoiseKey = field(default_factory=lambda: NoiseKey(0, 1.0))
    bf16: bool = False
    rough: bool = False  # chains stop early and lose their q at random
    branches: int = 3
    # a draft that ignores its context, and caches all or nothing by a token it drew for a later
    # position: were that position's noise used again next round, hits would be biased
    spiteful: bool = False


@dataclass
class Chains:
    tokens: torch.Tensor  # int64 [n, K]
    q: torch.Tensor | None  # float32 [n, K, V]


class Simulation:
    def __init__(self, case: Case, meta_seed: int) -> None:
        self.case, self.rng = case, np.random.default_rng(meta_seed)
        generator = torch.Generator().manual_seed(meta_seed)
        shape = (case.vocab, case.vocab)
        self.target = torch.randn(shape, generator=generator) * 1.2
        self.draft = self.target + torch.randn(shape, generator=generator)
        if case.spiteful:
            self.draft = self.draft[:1].repeat(case.vocab, 1)
        if case.bf16:
            self.target = self.target.bfloat16().float()
            self.draft = self.draft.bfloat16().float()
        key = case.key
        self.keys = [
            NoiseKey(10**7 * meta_seed + s, key.temperature, key.top_p, key.top_k, key.min_p)
            for s in range(SEQUENCES)
        ]
        self.sampling = RowSampling.from_keys(self.keys)

    def draft_chains(self, rows: np.ndarray, last: np.ndarray, starts: np.ndarray) -> Chains:
        sampling, tokens, q = self.sampling.take(rows), [], []
        current = torch.from_numpy(last)
        for depth in range(K):
            current, probs = draft_choice.propose(
                self.draft[current],
                sampling,
                starts + depth,
                self.case.rule,
                np.full(len(rows), depth),
                self.case.c,
                2,
            )
            tokens.append(current)
            if probs is not None:
                q.append(probs)
        return Chains(torch.stack(tokens, 1), torch.stack(q, 1) if q else None)

    def cached_outcomes(
        self, rows: np.ndarray, last: np.ndarray, starts: np.ndarray, chains: torch.Tensor
    ) -> torch.Tensor:
        """bool [n, K + 1, V]: the likeliest outcomes of each row, by the draft's own estimate."""
        n, vocab = len(rows), self.case.vocab
        before = torch.cat([torch.from_numpy(last)[:, None], chains], 1)
        offsets = np.tile(np.arange(K + 1), n)
        scores = draft_choice.fork_scores(
            self.draft[before.view(-1)],
            self.sampling.take(np.repeat(rows, K + 1)),
            np.repeat(starts, K + 1) + offsets,
            self.case.rule,
            offsets,
        )
        if self.case.spiteful:
            everything = chains[:, 1] == 0
            return everything[:, None, None].expand(-1, K + 1, vocab)
        own = torch.cat([chains, torch.full((n, 1), vocab)], 1).view(-1, 1)
        soft = torch.nn.functional.pad(torch.softmax(scores / 0.85, dim=-1), (0, 1))
        accept = soft.gather(1, own)
        chance = soft.scatter(1, own, 0.0)[:, :vocab]
        reach = torch.cumprod(torch.cat([torch.ones(n, 1), accept.view(n, K + 1)[:, :K]], 1), 1)
        ranked = (reach[:, :, None] * chance.view(n, K + 1, vocab)).view(n, -1)
        cached = torch.zeros(ranked.shape, dtype=torch.bool)
        return cached.scatter(1, ranked.topk(self.case.branches).indices, True).view(n, K + 1, -1)

    def judge(
        self, rows: np.ndarray, last: np.ndarray, starts: np.ndarray, chains: Chains, free: list
    ) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """Outcomes, and the chains as far as verified; ``free`` ones are point masses."""
        n, rough = len(rows), self.case.rough
        lengths = self.rng.integers(0, K + 1, n) if rough else np.full(n, K)
        lengths = np.where(self.rng.random(n) < 0.6, K, lengths)
        lost = (self.rng.random(n) < (0.15 if rough else 0)).tolist()
        short = [c[:m] for c, m in zip(chains.tokens.tolist(), lengths, strict=True)]
        flat = [t for x, c in zip(last.tolist(), short, strict=True) for t in (x, *c)]
        keys = [self.keys[r] for r in rows]
        logits, where = self.target[flat], starts.tolist()
        if self.case.rule == "shared_noise":
            return shared_noise.judge(logits, short, keys, where), short
        assert chains.q is not None
        q = [None if f else own for f, own in zip(free, chains.q, strict=True)]
        return rejection.judge(logits, short, keys, where, q, lost), short

    def run(self) -> tuple[np.ndarray, float]:
        """Counts of the first EMIT tokens, [V] * EMIT, and the hit rate."""
        case = self.case
        texts: list[list[int]] = [[0] for _ in range(SEQUENCES)]
        rows, free = np.arange(SEQUENCES), [False] * SEQUENCES
        last, starts = np.zeros(SEQUENCES, np.int64), np.ones(SEQUENCES, np.int64)
        chains = self.draft_chains(rows, last, starts)
        hits = rounds = 0
        while rows.size:
            cached = self.cached_outcomes(rows, last, starts, chains.tokens)
            outcomes, short = self.judge(rows, last, starts, chains, free)
            hit = np.array([bool(cached[i, k, t]) for i, (k, t) in enumerate(outcomes)])
            hits, rounds = hits + int(hit.sum()), rounds + len(rows)
            for row, chain, (k, token) in zip(rows, short, outcomes, strict=True):
                texts[row] += [*chain[:k], token]
            going = np.array([len(texts[r]) <= EMIT for r in rows])
            rows, hit = rows[going], hit[going]
            last = np.array([texts[r][-1] for r in rows], np.int64)
            starts = np.array([len(texts[r]) for r in rows], np.int64)
            if not rows.size:
                break
            chains = self.draft_chains(rows, last, starts)
            free = [False] * len(rows)
            if case.backup == "ngram":
                free = (~hit).tolist()
                guess = self.target[torch.from_numpy(last)].argmax(dim=-1)
                point = torch.stack([guess, self.target[guess].argmax(dim=-1)], 1)
                chains.tokens = torch.where(
                    torch.from_numpy(hit)[:, None], chains.tokens, point[:, :K]
                )
        counts = np.zeros((case.vocab,) * EMIT)
        for text in texts:
            counts[tuple(text[1 : EMIT + 1])] += 1
        return counts, hits / rounds

    def expected(self) -> np.ndarray:
        step = np.stack([target_probs(row, self.case.key) for row in self.target.tolist()])
        joint = step[0]
        for _ in range(EMIT - 1):
            joint = joint[..., None] * step
        return joint


CASES = {
    "shared": Case("shared_noise", "jit"),
    "shared-ngram-rough": Case("shared_noise", "ngram", rough=True, bf16=True),
    "shared-filters": Case("shared_noise", "ngram", 8, key=NoiseKey(0, 0.8, 0.9, 5, 0.02)),
    "rejection-jit-rough": Case("rejection", "jit", rough=True),
    "rejection-ngram": Case("rejection", "ngram"),
    "rejection-ngram-rough-bf16": Case("rejection", "ngram", c=0.5, rough=True, bf16=True),
    "rejection-spiteful": Case("rejection", "ngram", 3, spiteful=True),
    "shared-spiteful": Case("shared_noise", "ngram", 3, spiteful=True),
    "rejection-filters": Case("rejection", "ngram", 8, 0.7, NoiseKey(0, 0.8, 0.9, 5, 0.02)),
}


@pytest.mark.parametrize("name", CASES)
def test_rounds_emit_the_targets_joint_distribution(name: str) -> None:
    simulation = Simulation(CASES[name], meta_seed=1 if CASES[name].spiteful else 31)
    counts, hit_rate = simulation.run()
    assert counts.sum() == SEQUENCES
    assert 0.1 < hit_rate < 0.95
    assert chi_square(counts, simulation.expected()) > P_VALUE
