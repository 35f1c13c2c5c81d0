"""From what a client submitted to what the scheduler takes: checks, tokens, stop ids, a seed."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ipc.messages.client import MAX_ID, Submit
from ipc.messages.sampling import GREEDY_BELOW, NoiseKey, Processors
from ssd_pipe.errors import RequestError
from ssd_pipe.params import MAX_SEED, SamplingParams, derived_seed
from ssd_pipe.text.response_format import grammar_of
from ssd_pipe.text.thinking import BEGIN, is_open
from ssd_pipe.text.tokenizer import Tokenizer

LONG_TEXT = 4096  # characters; more takes longer to tokenize than an event loop should wait
PART_TEXT = 16  # characters that a turn, or a value for its template, counts for besides its own


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid request. ``max_tokens`` fits the room left; ``stop_ids`` includes EOS; one key for
    each answer wanted; ``thinking`` as in Chunk."""

    tokens: list[int]
    max_tokens: int
    keys: list[NoiseKey]
    stop_ids: list[int]
    thinking: bool | None = None


class Preparer:
    """Checks and tokenizes requests for one target model.

    Args:
        tokenizer: the target's.
        eos_ids: ids that end a text unless a request ignores them.
        vocab_size: rows of the target's embedding.
        max_model_len: most tokens of prompt and output together.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: Sequence[int], vocab_size: int, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    @staticmethod
    def is_long(submit: Submit) -> bool:
        """Whether tokenizing it should not be done on an event loop."""
        length = len(submit.prompt or "") + sum(map(len, submit.params.bad_words))
        for message in submit.messages or ():
            length += len(message.role) + len(message.content) + PART_TEXT
            if length > LONG_TEXT:
                return True
        length += _text_within(submit.chat_template_kwargs, LONG_TEXT - length)
        return length > LONG_TEXT or submit.params.response_format is not None

    def prepare(self, submit: Submit) -> Prepared:
        """Raises RequestError naming the field at fault."""
        if not 1 <= len(submit.id) <= MAX_ID:
            raise RequestError(400, f"must have 1 to {MAX_ID} characters", "id")
        params = submit.params
        params.validate()
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_ids(tuple(params.logit_bias or ()), "logit_bias")
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        grammar = self._grammar(params)
        field, tokens, thinking = self._tokens(submit)
        room = self._room(len(tokens), field)
        if submit.must_fit and params.max_tokens > room:
            raise RequestError(
                400,
                f"must be at most {room} (max_model_len = {self._max_model_len} less the prompt's "
                f"{len(tokens)} tokens), got {params.max_tokens}",
                "max_tokens",
            )
        eos = () if params.ignore_eos else self._eos_ids
        stop_ids = list(dict.fromkeys([*eos, *params.stop_token_ids]))
        processors = Processors(
            prompt_len=len(tokens),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple((params.logit_bias or {}).items()),
            min_tokens=params.min_tokens,
            stop_ids=tuple(stop_ids),
            grammar=grammar,
            allowed=params.allowed_token_ids or (),
            bad=tuple(dict.fromkeys(self._bad_words(params))),
        )
        if params.min_tokens and processors.allowed and not set(processors.allowed) - set(stop_ids):
            reason = "every one of them ends the text, which is not to be before min_tokens"
            raise RequestError(400, reason, "allowed_token_ids")
        keys = _keys(params, None if processors.neutral else processors)
        if grammar:  # such a text is all answer, and cannot end a thought the prompt began
            thinking = None
        return Prepared(tokens, min(params.max_tokens, room), keys, stop_ids, thinking)

    def _grammar(self, params: SamplingParams) -> str:
        grammar = grammar_of(params.response_format)
        if not grammar:
            return ""
        # The grammar says where the text ends, and only an EOS can say so; and something must be
        # left of what it allows.
        for field in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
            if getattr(params, field):
                raise RequestError(400, "cannot be combined with response_format", field)
        if not self._eos_ids:
            raise RequestError(400, "the model has no end-of-sequence token", "response_format")
        return grammar

    def _bad_words(self, params: SamplingParams) -> Iterator[tuple[int, ...]]:
        """Each word's tokens where it begins a text, and behind a space where that is one token
        for another (as vLLM has them)."""
        for word in params.bad_words:
            plain = self._tokenizer.encode(word.lstrip(), rendered=True)
            spaced = self._tokenizer.encode(f" {word.lstrip()}", rendered=True)
            if not plain:
                raise RequestError(400, f"{word!r} holds no tokens", "bad_words")
            yield tuple(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                yield tuple(spaced)

    def _tokens(self, submit: Submit) -> tuple[str, list[int], bool | None]:
        """The field that the prompt came in, its tokens, and Prepared's ``thinking``."""
        forms = {
            "prompt": submit.prompt,
            "messages": submit.messages,
            "token_ids": submit.token_ids,
        }
        given = [name for name, value in forms.items() if value is not None]
        if len(given) != 1:
            raise RequestError(
                400,
                "exactly one of prompt, messages and token_ids must be given, got "
                + (" and ".join(given) if given else "none"),
                given[-1] if given else "prompt",
            )
        field = given[0]
        self._check_ending(submit)
        if not forms[field]:
            raise RequestError(400, "must not be empty", field)
        thinking = None
        if submit.prompt is not None:
            tokens = self._encode(submit.prompt, field)
        elif submit.messages is not None:
            turns = [{"role": m.role, "content": m.content} for m in submit.messages]
            continued = submit.continue_final_message
            rendered = self._tokenizer.render_chat(
                turns, submit.chat_template_kwargs, submit.add_generation_prompt, continued
            )
            tokens = self._encode(rendered, field)
            if self._tokenizer.thinks:
                thinking = rendered.rstrip().endswith(BEGIN)
                thinking = thinking or (continued and is_open(turns[-1]["content"]))
        else:
            tokens = list(submit.token_ids or ())
            self._room(len(tokens), field)  # before each of millions is looked at
        if not tokens:
            raise RequestError(400, "holds no tokens", field)
        self._check_ids(tokens, field)
        return field, tokens, thinking

    @staticmethod
    def _check_ending(submit: Submit) -> None:
        """Raises RequestError for what says how messages end where there are none, or twice."""
        given = {
            "chat_template_kwargs": submit.chat_template_kwargs is not None,
            "add_generation_prompt": not submit.add_generation_prompt,
            "continue_final_message": submit.continue_final_message,
        }
        for name, said in given.items():
            if said and submit.messages is None:
                raise RequestError(400, "only with messages", name)
        if submit.continue_final_message and submit.add_generation_prompt:
            reason = "only without add_generation_prompt"
            raise RequestError(400, reason, "continue_final_message")

    def _encode(self, text: str, field: str) -> list[int]:
        # What cannot fit is refused before a minute goes into tokenizing it.
        self._room(self._tokenizer.least_tokens(text), field, "at least ")
        return self._tokenizer.encode(text, rendered=field == "messages")

    def _room(self, count: int, field: str, about: str = "") -> int:
        """Tokens left for output after ``count`` of input. Raises RequestError if none are."""
        room = self._max_model_len - count
        if room < 1:
            raise RequestError(
                400,
                f"{about}{count} tokens and at least one of output exceed max_model_len = "
                f"{self._max_model_len}",
                field,
            )
        return room

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    400, f"{token_id} is not a token id, they are 0..{self._vocab_size - 1}", field
                )


def _text_within(value: Any, limit: int) -> int:
    """Characters that a free-form value counts for; not much more than ``limit``."""
    length, rest = 0, [value] if value else []
    while rest and length <= limit:
        part = rest.pop()
        length += PART_TEXT
        if isinstance(part, str | bytes):
            length += len(part)
        elif isinstance(part, dict):
            rest += [*part.keys(), *part.values()]
        elif isinstance(part, list):
            rest += part
    return length


def _keys(params: SamplingParams, processors: Processors | None) -> list[NoiseKey]:
    """One per answer. All greedy ones are alike: nothing else shapes their tokens."""
    if params.temperature < GREEDY_BELOW:
        return [NoiseKey(processors=processors)] * params.n
    seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
    shape = (params.temperature, params.top_p, params.top_k, params.min_p, processors)
    return [NoiseKey(derived_seed(seed, index), *shape) for index in range(params.n)]
