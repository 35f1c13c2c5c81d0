"""Structured output: which tokens a grammar allows next, by llguidance.

Target and draft each keep a matcher per sequence, advanced by committed tokens only. Positions
along a chain or a branch are looked at with copies of it, which are cheap, so nothing has to be
taken back when a proposal is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from models.config import ModelConfig
from ssd_pipe.text.deep_stack import on_deep_stack
from ssd_pipe.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance  # at run time only once there is a grammar

STEP_MAX_ITEMS = 5_000
"""What a matcher may look at for one token. An ambiguous grammar takes all it is given, at each
place of each row; more than a schema of 60 properties needs takes more than a few milliseconds."""
_NO_EXTENSION = "NoExtension"  # and longer: llguidance's name for it, which is all it says


class Grammars:
    """Compiles grammars for one tokenizer, on a thread, while the prompt is being read.

    Args:
        tokenizer: makes llguidance's view of the tokenizer; called with the first grammar (a
            second or so, during which this process does nothing else).
    """

    def __init__(self, tokenizer: Callable[[], llguidance.LLTokenizer]) -> None:
        self._load = tokenizer

    @classmethod
    def of_model(cls, folder: Path, vocab_size: int) -> Grammars:
        """For the model in ``folder``; masks are ``vocab_size`` wide."""

        def load() -> llguidance.LLTokenizer:
            import llguidance

            file = folder / "tokenizer.json"
            source = str(file) if file.is_file() else Tokenizer.load(folder).backend.to_str()
            eos = list(ModelConfig.from_folder(folder).eos_ids)
            return llguidance.LLTokenizer(source, n_vocab=vocab_size, eos_token=eos)

        return cls(load)

    def start(self, grammar: str) -> GrammarState:
        """The state before the first token; does not wait for the compiler."""
        return GrammarState(self._pool.submit(self._compile, grammar))

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        import llguidance

        tokenizer = self._tokenizer
        limits = llguidance.LLParserLimits(step_max_items=STEP_MAX_ITEMS)
        return on_deep_stack(
            lambda: llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        )

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        return self._load()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar")


class Unmaskable(Exception):
    """The grammar cannot say what may come next; the text is the reason."""


class GrammarState:
    """One sequence's place in its grammar.

    Attributes:
        failure: why there is none any more (the grammar is too complex, say); empty if all is well.
    """

    def __init__(self, matcher: Future[llguidance.LLMatcher]) -> None:
        self._coming = matcher
        self.failure = ""

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens of output have been added."""
        matcher = self._matcher()
        if matcher is not None and tokens and not matcher.consume_tokens(list(tokens)):
            self.failure = _reason(matcher.get_error())

    def mask(self, suffix: Sequence[int]) -> bytes | None:
        """The tokens allowed after the committed ones and ``suffix``, a bit each, lowest first.

        None where ``suffix`` does not fit the grammar: no such text will be, so anything goes.
        Raises Unmaskable where the matcher cannot say: nothing may be emitted there.
        """
        matcher = self._matcher()
        if matcher is None:
            raise Unmaskable(self.failure)
        if suffix:
            matcher = matcher.deep_copy()
            fits = matcher.try_consume_tokens(list(suffix)) == len(suffix)
            if not fits and not matcher.is_error():
                return None
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        reason = ""
        if matcher.is_error():
            reason = _reason(matcher.get_error())
        elif mask.count(0) == len(mask):
            reason = "no token of the vocabulary can follow"
        if reason:
            if not suffix:
                self.failure = reason
            raise Unmaskable(reason)
        return mask

    def _matcher(self) -> llguidance.LLMatcher | None:
        if self.failure:
            return None
        try:
            matcher = self._coming.result()
        except Exception as error:  # whatever the library makes of the tokenizer
            self.failure = _reason(str(error))
            return None
        if matcher.is_error():
            self.failure = _reason(matcher.get_error())
            return None
        return matcher


def _reason(error: str) -> str:
    """The library's error without what follows its first line, and in words."""
    first = (error.strip().splitlines() or ["unknown error"])[0]
    return "no text can match it from there on" if first.startswith(_NO_EXTENSION) else first
