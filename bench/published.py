"""Published throughput, and the acceptance that it implies.

Kumar, Dao, May (arXiv 2603.03251): 4 H100s for the target and one for the draft, bf16, b = 1,
greedy, 512 tokens, mean of HumanEval, UltraFeedback, Alpaca and GSM8K. Acceptance a token is not
published; what is can only be met by one. With x the draft's time of a chain in verifications, p
the hit rate and E the tokens of a round (Theorem 7, a tree hidden behind its verification)::

    SD / AR = E / (1 + x)        SSD / SD = (1 + x) / (p + (1 - p) (1 + x))

two equations for x and E; and E = 1 + a + ... + a^K gives a for the K of the pair.
"""

from __future__ import annotations

import msgspec

from ssd_pipe.engine.pacing import expected_tokens

HIT_RATES = {0.0: 0.86, 0.7: 0.81, 1.0: 0.63}
"""By temperature."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One pair's figures: tokens a second, hit rate, draft tokens a round.

    ``k`` of the 32B pair is the best one of a third party's rerun. That of the 70B pair is not
    published; with 7, a draft step is the tenth of a verification that a 1B model takes there.
    """

    ar: float
    sd: float
    ssd: float
    k: int
    hit_rate: float = HIT_RATES[0.0]

    @property
    def draft_share(self) -> float:
        """x: time to draft a chain, in verifications."""
        gain, p = self.ssd / self.sd, self.hit_rate
        return gain * p / (1 - gain * (1 - p)) - 1

    @property
    def tokens_per_round(self) -> float:
        """E."""
        return self.sd / self.ar * (1 + self.draft_share)

    @property
    def acceptance(self) -> float:
        """a: chance that a draft token is accepted."""
        return acceptance_for(self.tokens_per_round, self.k)


PUBLISHED = {
    "llama70b": Published(ar=54.7, sd=161.8, ssd=255.8, k=7),
    "qwen32b": Published(ar=88.8, sd=136.8, ssd=203.8, k=4),
}


def acceptance_for(tokens_per_round: float, k: int) -> float:
    """The chance with which ``expected_tokens`` gives so many; 0 or 1 beyond what any gives."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(middle, k) < tokens_per_round:
            low = middle
        else:
            high = middle
    return low
