"""From the bytes of a request body to prompts and SamplingParams, or an error naming the field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec

from ipc.messages.client import ChatMessage
from procs.http import formats
from procs.http.errors import UNSUPPORTED, ApiError
from procs.http.schemas import (
    NEUTRAL,
    SAMPLING_NAMES,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    GenerationRequest,
    RequestMessage,
    TokenizeRequest,
)
from ssd_pipe.params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams, checked, wrong_type

COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat answer may fill the context
TEMPERATURE = 1.0  # OpenAI's default
NO_SEED = -1  # what other servers' clients say for a new one each time
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
PARTS_JOINT = "\n"

Body: TypeAlias = GenerationRequest | TokenizeRequest | DetokenizeRequest
Wanted = TypeVar("Wanted", bound=Body)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in one of its three forms; ``template_kwargs`` with ``messages`` only, as what
    says how these end (see Submit)."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    template_kwargs: dict[str, Any] | None = None
    generation_prompt: bool = True
    continued: bool = False


def decode(body: bytes, kind: type[Wanted]) -> Wanted:
    """Raises ApiError or RequestError (400): not JSON, a wrong type, an unsupported field."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise wrong_type(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    for name in request.unsupported:
        # Tools that must not be called are as good as none.
        if name != "tools" or getattr(request, "tool_choice", None) != "none":
            _refuse_unless_neutral(name, getattr(request, name))
    return request


def names_of(request: Body) -> dict[str, str]:
    """Names of ours that the request has others for. Raises ApiError (400) for two formats."""
    names = {}
    if isinstance(request, GenerationRequest):
        names["response_format"] = formats.given_format(request)[0] or "response_format"
    # What is wrong with the limit is told of the field that the request has it in.
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return {ours: theirs for ours, theirs in names.items() if ours != theirs}


def prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion request. Raises ApiError if their forms are mixed."""
    given = request.prompt
    if given is None:
        raise ApiError(400, "is required", "prompt")
    if isinstance(given, str):
        return [Prompt(text=given)]
    if not given:
        raise ApiError(400, "must not be empty", "prompt")
    if all(isinstance(item, int) for item in given):
        return [Prompt(token_ids=tuple(item for item in given if isinstance(item, int)))]
    if all(isinstance(item, str) for item in given):
        return [Prompt(text=item) for item in given if isinstance(item, str)]
    if all(isinstance(item, list) for item in given):
        return [Prompt(token_ids=tuple(item)) for item in given if isinstance(item, list)]
    raise ApiError(400, "must be texts only, ids only, or lists of ids only", "prompt")


def conversation(request: ChatRequest) -> Prompt:
    """The messages of a chat request, as text. Raises ApiError naming the message."""
    return _chat_prompt(request, request.messages)


def to_tokenize(request: TokenizeRequest) -> Prompt:
    """A text, or messages. Raises ApiError (400) for both or none."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "exactly one of prompt and messages must be given", "prompt")
    if request.messages is not None:
        return _chat_prompt(request, request.messages)
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(request, name) is not None:
            raise ApiError(400, "only with messages", name)
    return Prompt(text=request.prompt)


def choices(request: GenerationRequest, prompts: Sequence[Prompt]) -> int:
    """Answers to each prompt. Raises ApiError (400) if they are too many in all."""
    n = 1 if request.n is None else request.n
    if not 1 <= n * len(prompts) <= MAX_CHOICES:
        reason = f"1 to {MAX_CHOICES} answers a request, got {n} * {len(prompts)} prompts"
        raise ApiError(400, reason, "n")
    return n


def sampling(request: GenerationRequest, n: int, max_model_len: int) -> SamplingParams:
    """Parameters of a request for ``n`` answers to each prompt.

    Raises ApiError for what does not go together, RequestError for what is out of range.
    """
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "only with stream = true", "stream_options")
    if request.skip_special_tokens is False and request.spaces_between_special_tokens is False:
        # Those that are left out have no spaces anyway.
        raise ApiError(400, UNSUPPORTED, "spaces_between_special_tokens", "unsupported_parameter")
    values: dict[str, Any] = {
        "n": n,
        "temperature": TEMPERATURE,
        "max_tokens": COMPLETION_TOKENS,
    }
    if isinstance(request, ChatRequest):
        values["max_tokens"] = _chat_limit(request, max_model_len)
    elif request.max_tokens is not None:
        values["max_tokens"] = request.max_tokens
    values["logprobs"] = _logprobs(request)
    given = {name: getattr(request, name) for name in SAMPLING_NAMES}
    given["response_format"] = formats.response_format(request)
    if given["seed"] == NO_SEED:
        given["seed"] = None
    values |= {name: value for name, value in given.items() if value is not None}
    return checked(None, values)


def given_limit(request: GenerationRequest) -> bool:
    """Whether the request itself says how long the answer may be."""
    newer = isinstance(request, ChatRequest) and request.max_completion_tokens is not None
    return newer or request.max_tokens is not None


def _chat_limit(request: ChatRequest, max_model_len: int) -> int:
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise ApiError(400, "differs from max_completion_tokens", "max_tokens")
    limit = new if new is not None else old
    return max_model_len if limit is None else limit


def _logprobs(request: GenerationRequest) -> int | None:
    """Alternatives to report at each position; None for no log probabilities."""
    if isinstance(request, CompletionRequest):
        if request.echo and request.logprobs is not None:
            raise ApiError(400, "not together with echo: prompts have no logprobs here", "logprobs")
        return request.logprobs
    if not isinstance(request, ChatRequest):
        return None
    top = request.top_logprobs or 0
    if not request.logprobs:
        if top:
            raise ApiError(400, "only with logprobs = true", "top_logprobs")
        return None
    if not 0 <= top <= MAX_LOGPROBS:
        raise ApiError(400, f"must be 0..{MAX_LOGPROBS}, got {top}", "top_logprobs")
    return top


def _refuse_unless_neutral(name: str, value: Any) -> None:
    # By type too: False asks for no logprobs, 0 for those of the chosen tokens.
    neutral = any(type(value) is type(v) and value == v for v in NEUTRAL.get(name, ()))
    if value is not None and not neutral:
        raise ApiError(400, UNSUPPORTED, name, "unsupported_parameter")


def _chat_prompt(
    request: ChatRequest | TokenizeRequest, messages: Sequence[RequestMessage]
) -> Prompt:
    begins, continued = request.add_generation_prompt, bool(request.continue_final_message)
    if begins and continued:
        raise ApiError(400, "only without add_generation_prompt", "continue_final_message")
    return Prompt(
        messages=_messages(messages),
        template_kwargs=request.chat_template_kwargs,
        generation_prompt=not continued if begins is None else begins,
        continued=continued,
    )


def _messages(given: Sequence[RequestMessage]) -> tuple[ChatMessage, ...]:
    if not given:
        raise ApiError(400, "must hold at least one message", "messages")
    return tuple(_message(i, m) for i, m in enumerate(given))


def _message(index: int, message: RequestMessage) -> ChatMessage:
    where = f"messages.{index}"
    role = ROLES.get(message.role)
    if role is None:
        known = ", ".join(ROLES)
        raise ApiError(400, f"{message.role!r} is none of {known}", f"{where}.role")
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise ApiError(400, UNSUPPORTED, f"{where}.{name}")
    content = message.content
    if content is None and role == "assistant":
        return ChatMessage(role, "")
    if content is None:
        raise ApiError(400, "must be a text or a list of text parts", f"{where}.content")
    if isinstance(content, str):
        return ChatMessage(role, content)
    texts = [_text(part, f"{where}.content.{i}") for i, part in enumerate(content)]
    return ChatMessage(role, PARTS_JOINT.join(texts))


def _text(part: ContentPart, where: str) -> str:
    if part.type != "text" or part.text is None:
        reason = f"only parts of type 'text' are supported, got {part.type!r}"
        raise ApiError(400, reason if part.type != "text" else "has no text", where)
    return part.text
