"""What the OpenAI-compatible routes take. Strict: an unknown field is an error that names it.

Three kinds of field: sampling fields, which go to SamplingParams by name (a field that it lacks is
refused unless it has its neutral value); fields that change nothing about the answer, which are
ignored; and fields that would change it in a way this server cannot, which are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

Int: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that are passed on to SamplingParams under the same name.

    A new field of SamplingParams needs one line here. None stands for "not given".
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    seed: Int | None = None
    min_tokens: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: dict[str, Any] | None = None
    timeout: float | None = None


SAMPLING_NAMES = SamplingFields.__struct_fields__

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
}
"""Values that ask for nothing, by field, beside None."""

REFUSED = (
    "suffix",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "web_search_options",
    "reasoning_effort",
    "verbosity",
)
"""Fields that this server cannot honour; anything but a neutral value is an error."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``include_usage``: one more chunk at the end, without choices and with the usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both routes take. ``n`` answers to each prompt; with a seed, the first has that seed."""

    model: str | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Ignored: they do not change the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``. ``prompt``: text, texts, token ids, or lists of token ids.

    ``return_token_ids``: choices carry ``token_ids``, as vLLM and SGLang have it.
    """

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    best_of: Int | None = None
    return_token_ids: bool | None = None
    logprobs: Int | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message; only type "text" is served."""

    type: str
    text: str | None = None


class RequestMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message. Fields beyond these are ignored, so that answers can be sent back as they are.

    Roles: system, developer (the same), user, assistant.
    """

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: list[RequestMessage]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
