"""From what a caller gives to the message that submits a request, and its bytes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ipc.messages.client import ChatMessage, Submit
from ssd_pipe.endpoint import MAX_MESSAGE
from ssd_pipe.errors import RequestError
from ssd_pipe.params import SamplingParams, checked

Messages = Sequence[ChatMessage | Mapping[str, str]]
Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or as vLLM has them ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""


def _plain(value: Any) -> Any:
    """Python's own number or list for another library's."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return value.tolist()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_OF_MAPPINGS = ("prompt", "prompt_token_ids")
_KNOWN = " or ".join(map(repr, _OF_MAPPINGS))
_UNSENDABLE = (UnicodeEncodeError, TypeError, OverflowError, RecursionError)


def chat_messages(messages: Messages | None) -> tuple[ChatMessage, ...] | None:
    """Raises RequestError (400) for what is no conversation."""
    if messages is None:
        return None
    try:
        turns = [msgspec.structs.asdict(m) if isinstance(m, ChatMessage) else m for m in messages]
        return msgspec.convert(turns, tuple[ChatMessage, ...])
    except (msgspec.ValidationError, TypeError) as error:
        reason = f"each needs a role and a content, both texts: {error}"
        raise RequestError(400, reason, "messages") from None


def token_ids(ids: Sequence[int] | None) -> tuple[int, ...] | None:
    """Raises RequestError (400) for what are no whole numbers; they may be numpy's."""
    if ids is None:
        return None
    try:
        return tuple(operator.index(each) for each in ids)
    except TypeError as error:
        raise RequestError(400, f"must be whole numbers: {error}", "token_ids") from None


def text_and_ids(prompt: Prompt | None) -> tuple[str | None, Sequence[int] | None]:
    """A prompt as a text or as token ids; the other is None, both are without one. Of a mapping
    that has both, the ids count. Raises RequestError (400) for any other type."""
    if prompt is None or isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        for name, value in prompt.items():
            if name not in _OF_MAPPINGS and value is not None:
                raise RequestError(400, f"unknown key {name!r}; known: {_KNOWN}", "prompt")
        if (ids := prompt.get("prompt_token_ids")) is not None:
            return None, ids
        if isinstance(text := prompt.get("prompt"), str):
            return text, None
        raise RequestError(400, f"a dict needs {_KNOWN}", "prompt")
    if isinstance(prompt, bytes | bytearray) or not hasattr(prompt, "__iter__"):
        kind = type(prompt).__name__
        raise RequestError(400, f"must be a text, token ids or a dict, got {kind}", "prompt")
    return None, prompt


def each_prompt(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list of them. A flat list of numbers is one prompt. Raises
    RequestError (400) for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    plain = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(plain, bytes | bytearray) or not hasattr(plain, "__iter__"):
        kind = type(prompts).__name__
        raise RequestError(400, f"must be a prompt or a list of prompts, got {kind}", "prompts")
    several = list(plain)
    return [several] if several and all(map(_is_number, several)) else several


def _is_number(value: Any) -> bool:
    """Whether it is a whole number, perhaps numpy's; arrays of one element are not."""
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)


def sampling(params: SamplingParams | None, overrides: dict[str, Any]) -> SamplingParams:
    """Raises RequestError (400) as ``checked``, TypeError for a field that there is not."""
    if unknown := overrides.keys() - set(SamplingParams.__struct_fields__):
        raise TypeError(f"SamplingParams have no {', '.join(sorted(unknown))}")
    return checked(params, overrides)


def encode(submit: Submit) -> bytes:
    """Raises RequestError: 413 for a message that is too long, 400 for what none can hold, by the
    name of the field that holds it."""
    try:
        data = _ENCODER.encode(submit)
    except _UNSENDABLE as error:
        raise _refusal(submit, error) from None
    if len(data) > MAX_MESSAGE:
        raise RequestError(413, f"request of {len(data)} bytes, the limit is {MAX_MESSAGE}")
    return data


def _refusal(submit: Submit, error: Exception) -> RequestError:
    """What is wrong with a message that gave ``error``: each field is tried in one of its own."""
    params = submit.params
    alone = {name: {name: getattr(submit, name)} for name in submit.__struct_fields__}
    del alone["params"]
    alone |= {
        name: {"params": SamplingParams(**{name: getattr(params, name)})}
        for name in params.__struct_fields__
    }
    field = ""
    for name, given in alone.items():
        try:
            _ENCODER.encode(Submit(**({"id": ""} | given)))
        except _UNSENDABLE as own:
            field, error = name, own
            break
    if isinstance(error, UnicodeEncodeError):
        return RequestError(400, "not valid Unicode", field)
    return RequestError(400, f"cannot be sent: {error}", field)
