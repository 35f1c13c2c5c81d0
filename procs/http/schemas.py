"""What the OpenAI-compatible routes take.

Four kinds of field: sampling fields, which go to SamplingParams by name; other servers' names of
``response_format``; fields known to change the answer in a way this server cannot, which are
refused; and all others, which are ignored as other servers do, since clients send many.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

Int: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
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
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    seed: Int | None = None
    min_tokens: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    timeout: float | None = None


SAMPLING_NAMES = SamplingFields.__struct_fields__


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``structured_outputs``, as vLLM has it: one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    # Refused where they are true, or given at all.
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


class FormatFields(SamplingFields, frozen=True, kw_only=True):
    """Other names of ``response_format``, a field for each of its types. Schemas may be texts."""

    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    # of SGLang and llama.cpp
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None


FORMAT_NAMES = FormatFields.__struct_fields__[len(SAMPLING_NAMES) :]


class UnsupportedFields(FormatFields, frozen=True, kw_only=True):
    """Fields that would change the answer in a way this server cannot: anything but what asks for
    nothing (None, and what NEUTRAL has) is an error."""

    suffix: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    # of vLLM and SGLang
    chat_template: Any = None
    documents: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    guided_whitespace_pattern: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    no_stop_trim: Any = None
    stop_regex: Any = None
    # of llama.cpp
    n_predict: Any = None
    repeat_penalty: Any = None
    typical_p: Any = None
    top_n_sigma: Any = None
    xtc_probability: Any = None
    dry_multiplier: Any = None
    mirostat: Any = None


UNSUPPORTED_NAMES = UnsupportedFields.__struct_fields__[len(FormatFields.__struct_fields__) :]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "documents": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "logits_processors": ([],),
    "no_stop_trim": (False,),
    "n_predict": (-1,),
    "repeat_penalty": (1.0, 1),
    "typical_p": (1.0, 1),
    "top_n_sigma": (-1.0, -1),
    "xtc_probability": (0.0, 0),
    "dry_multiplier": (0.0, 0),
    "mirostat": (0,),
    "add_special_tokens": (True,),
    "echo": (False,),
}
"""Values that ask for nothing, by field, beside None."""


class StreamOptions(msgspec.Struct, frozen=True):
    """``include_usage``: one more chunk at the end, without choices and with the usage.

    ``continuous_usage_stats``, with it: every chunk has the usage so far, of its own answer.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(UnsupportedFields, frozen=True, kw_only=True):
    """What both routes take. ``n`` answers to each prompt; with a seed, the first has that seed.

    ``unsupported``: names of the fields that are refused.
    """

    unsupported: ClassVar[tuple[str, ...]] = UNSUPPORTED_NAMES
    model: str | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """``POST /v1/completions``. ``prompt``: text, texts, token ids, or lists of token ids.

    ``return_token_ids``: choices carry ``token_ids``, as vLLM and SGLang have it.
    """

    unsupported: ClassVar[tuple[str, ...]] = (
        *UNSUPPORTED_NAMES,
        "prompt_embeds",
        "add_special_tokens",
    )
    # Not given with the embeddings, which are to be refused by their name.
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    prompt_embeds: Any = None
    add_special_tokens: Any = None
    echo: bool | None = None
    best_of: Int | None = None
    return_token_ids: bool | None = None
    logprobs: Int | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message; only type "text" is served."""

    type: str
    text: str | None = None


class RequestMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message. Fields beyond these are ignored, so that answers can be sent back as they are.

    Roles: system, developer (the same), user, assistant, whose content may be null.
    """

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``, as vLLM has it: ``prompt``, or ``messages`` for the chat template.

    ``add_special_tokens``: those the tokenizer adds by itself; by default to a prompt only, since
    templates have their own. ``return_token_strs``: answer their names in the vocabulary, too.
    """

    unsupported: ClassVar[tuple[str, ...]] = ("tools", "chat_template")
    model: str | None = None
    prompt: str | None = None
    messages: list[RequestMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused, as where texts are generated.
    tools: Any = None
    chat_template: Any = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``, as vLLM has it."""

    unsupported: ClassVar[tuple[str, ...]] = ()
    model: str | None = None
    tokens: list[TokenId]


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``.

    ``chat_template_kwargs``: variables of the model's chat template, as
    ``{"enable_thinking": false}``. ``add_generation_prompt``: an answer begins after the messages
    (the default); or with ``continue_final_message`` the last of them goes on.
    ``separate_reasoning``, as SGLang has it: what the model thinks
    first goes to ``reasoning_content`` (the default), or with false stays in the text.
    """

    unsupported: ClassVar[tuple[str, ...]] = (*UNSUPPORTED_NAMES, "echo")
    messages: list[RequestMessage]
    echo: Any = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    separate_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
