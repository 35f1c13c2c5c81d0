"""Sampling parameters of one request, and their limits. They travel as they are and so live in
``ipc.messages.sampling``; here users find them, and here they are checked for type and range."""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ipc.errors import RequestError
from ipc.messages.sampling import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_FORMAT_BYTES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_TIMEOUT,
    MAX_TOKENS,
    SamplingParams,
    derived_seed,
)

__all__ = [
    "MAX_BIASES",
    "MAX_CHOICES",
    "MAX_FORMAT_BYTES",
    "MAX_LOGPROBS",
    "MAX_SEED",
    "MAX_TIMEOUT",
    "MAX_TOKENS",
    "SamplingParams",
    "checked",
    "derived_seed",
    "wrong_type",
]

_PLACE = re.compile(r"(.*) - at `(?:key` in `)?\$([^`]*)`", re.DOTALL)


def checked(params: SamplingParams | None, changes: Mapping[str, Any]) -> SamplingParams:
    """``params``, or the defaults, with ``changes``, as users of other engines write them.

    Numbers, also in lists, may be numpy's, ``stop`` one text, and -1 is a ``top_k`` of all. Those
    deeper in a ``response_format`` stay as they are until it is sent (see ``submission``). Raises
    RequestError (400) naming the first field of a wrong type or out of range.
    """
    values = msgspec.structs.asdict(params or SamplingParams()) | dict(changes)
    try:
        plain = {field: _plain(field, value) for field, value in values.items()}
        if isinstance(plain["stop"], str):
            plain["stop"] = [plain["stop"]]
        if plain["top_k"] == -1:
            plain["top_k"] = 0
        made = msgspec.convert(plain, SamplingParams)
    except msgspec.ValidationError as error:
        raise wrong_type(error) from None
    made.validate()
    return made


def wrong_type(error: msgspec.ValidationError, part: str = "") -> RequestError:
    """What the library says of a value, as an error (400) that names the field.

    Args:
        error: the library's.
        part: of the message that the user knows nothing of, left out of the name.
    """
    found = _PLACE.fullmatch(str(error))
    text, path = found.groups() if found else (str(error), "")
    field = path.replace("[...]", "").replace("[", ".").replace("]", "").lstrip(".")
    field = field.removeprefix(f"{part}.")
    if "`" in text and text.startswith("Object missing"):
        name = text.split("`")[1]
        field, text = f"{field}.{name}" if field else name, "is required"
    return RequestError(400, text, field)


def _plain(field: str, value: Any) -> Any:
    try:
        if isinstance(value, Mapping):
            return {_plain_number(k): _plain_number(v) for k, v in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_plain_number(each) for each in value]
        return _plain_number(value)
    except OverflowError:
        raise RequestError(400, "Number out of range", field) from None


def _plain_number(value: Any) -> Any:
    """Python's own number for another library's, its list for an array; all else as it is."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        value = int(value)
        float(value)  # raises OverflowError for what an error's text could not hold either
        return value
    return float(value) if isinstance(value, numbers.Real) else value
