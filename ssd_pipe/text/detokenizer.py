"""Token ids to text, a few at a time, with exactly the text that decoding them at once gives.

Byte-level BPE is a plain byte stream, so it is decoded as one. Other decoders (sentencepiece
style) are run over the new tokens behind a few old ones, so that what depends on the text before
(a leading space, runs of byte tokens) comes out right.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Protocol

from ssd_pipe.text.tokenizer import Tokenizer, byte_of_char

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_SPACE = "\u2581"  # what sentencepiece writes for a space


class Detokenizer(Protocol):
    """One per answer. The texts of all calls concatenate to ``tokenizer.decode(all ids)``, with
    special tokens if it is to show them."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain after these ids too; characters split over tokens wait."""

    def finish(self) -> str:
        """What was still waiting. Nothing may be pushed afterwards."""


class DetokenizerFactory:
    """Makes a Detokenizer per answer for one tokenizer; holds what they share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = _is_byte_level(tokenizer)
        self._token_bytes = _TokenBytes(tokenizer, special=False)
        self._all_bytes = _TokenBytes(tokenizer, special=True)

    def new(self, special: bool = False) -> Detokenizer:
        """``special``: that shows special tokens, by their names."""
        if self._byte_level:
            return ByteStreamDetokenizer(self._all_bytes if special else self._token_bytes)
        return WindowDetokenizer(self._tokenizer, special)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 text of one token by itself, maybe part of a character; a special token's name."""
        if token_id in self._tokenizer.special_ids or not self._byte_level:
            return self._named_bytes(token_id)
        return self._token_bytes[token_id]

    def _named_bytes(self, token_id: int) -> bytes:
        name = self._tokenizer.backend.id_to_token(token_id) or ""
        if _BYTE_TOKEN.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        return name.replace(_SPACE, " ").encode()


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token of a byte-level vocabulary, filled as tokens are seen; none of special
    ones unless ``special``."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._left_out = frozenset() if special else tokenizer.special_ids
        self._byte_of = byte_of_char()

    def __missing__(self, token_id: int) -> bytes:
        if token_id in self._left_out:
            value = b""
        else:
            text = self._tokenizer.backend.id_to_token(token_id) or ""
            try:
                value = bytes(self._byte_of[c] for c in text)
            except KeyError:  # an added token, written as it is
                value = text.encode()
        self[token_id] = value
        return value


class ByteStreamDetokenizer:
    """For byte-level BPE: an incremental UTF-8 decoder over the tokens' bytes."""

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(self._token_bytes[i] for i in ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any decoder: decodes new tokens behind the last ones whose text is out.

    A run of byte tokens waits for its end: the decoder takes the run as UTF-8 as a whole or not
    at all, so an invalid last byte changes the text of the first.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._context: list[int] = []
        self._waiting: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        left_out = frozenset() if self._special else self._tokenizer.special_ids
        self._waiting += [i for i in ids if i not in left_out]
        if not self._waiting:
            return ""
        last = self._tokenizer.backend.id_to_token(self._waiting[-1]) or ""
        if _BYTE_TOKEN.fullmatch(last):
            return ""
        text = self._new_text()
        if text.endswith(_REPLACEMENT):
            return ""
        self._advance(text)
        return text

    def finish(self) -> str:
        text = self._new_text() if self._waiting else ""
        self._advance(text)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, self._special)
        whole = self._tokenizer.decode(self._context + self._waiting, self._special)
        return whole[len(before) :]

    def _advance(self, text: str) -> None:
        # The context must hold text: a decoder strips the space of the first token that has any.
        self._context = self._waiting if text else self._context + self._waiting
        self._waiting = []


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return False
    spec = json.loads(decoder.__getstate__())
    members = spec["decoders"] if spec.get("type") == "Sequence" else [spec]
    kinds = {member.get("type") for member in members}
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}
