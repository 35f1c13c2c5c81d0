"""Prompt lookup: propose what followed the last earlier occurrence of the sequence's own suffix.

Costs no model forward, so it is a backup for speculation-cache misses, and works best where output
repeats input (code edits, summaries). The proposal is deterministic: judge it as a point mass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ssd_pipe.errors import ConfigError


class NgramProposer:
    """Tokens of one sequence, with an index of where each of its n-grams was last followed.

    Indexing is incremental: a step costs one dictionary entry per n-gram length and token.
    """

    def __init__(self, ngram_max: int, ngram_min: int, tokens: Iterable[int] = ()) -> None:
        """Raises ConfigError unless 1 <= ngram_min <= ngram_max."""
        if not 1 <= ngram_min <= ngram_max:
            raise ConfigError(
                "speculation.ngram_min", f"must be 1..ngram_max = {ngram_max}, got {ngram_min}"
            )
        self._lengths = range(ngram_max, ngram_min - 1, -1)
        self._tokens = list(tokens)
        self._indexed = 0
        self._next_of: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens."""
        self._tokens.extend(tokens)

    def propose(self, k: int) -> Sequence[int]:
        """Up to ``k`` tokens that followed the most recent earlier match of the longest suffix.

        Longer suffixes go first, from ngram_max down to ngram_min tokens; empty if none occurred
        before. Fewer than ``k`` tokens if the match is closer than that to the end.
        """
        self._index()
        for n in self._lengths:
            if n > len(self._tokens):
                continue
            follower = self._next_of.get(tuple(self._tokens[-n:]))
            if follower is not None:
                return self._tokens[follower : follower + k]
        return []

    def _index(self) -> None:
        # An n-gram is indexed once a token follows it, so a suffix never matches itself.
        tokens, end = self._tokens, len(self._tokens)
        if self._indexed == end:
            return
        for n in self._lengths:
            first = max(self._indexed, n)
            if first < end:
                ngrams = zip(*(tokens[first - n + i : end - n + i] for i in range(n)), strict=True)
                self._next_of.update(zip(ngrams, range(first, end), strict=True))
        self._indexed = end
