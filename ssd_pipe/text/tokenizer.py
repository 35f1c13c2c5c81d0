"""Text to token ids, from a model folder, without importing torch.

The folder's ``tokenizer.json`` is read with the ``tokenizers`` package and its chat template is
rendered with jinja2, as transformers renders it. A folder without that file goes through
transformers once, which does import torch.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.folder import check_tokenizer, read_object
from ssd_pipe.errors import ModelError, RequestError
from ssd_pipe.text.thinking import END

REASON_LENGTH = 400  # characters of what transformers says of a tokenizer it cannot read
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # the space tells whether the template trims
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """A model's tokenizer and chat template. Safe to use from several threads.

    Attributes:
        backend: the ``tokenizers`` object.
        vocab_size: number of ids it knows, added tokens included.
        special_ids: ids that decoding leaves out.
        thinks: whether the chat template knows of thoughts before an answer.
        named_tokens: texts of the tokens that templates refer to (``bos_token``, ...).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.named_tokens = dict(named_tokens or {})
        self._longest, self._lost = _bounds(backend)
        self.thinks = END in (chat_template or "")
        self._template = _compile(chat_template) if chat_template else None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a model folder. Raises ModelError."""
        file = folder / "tokenizer.json"
        settings = _read_json(folder / "tokenizer_config.json")
        if file.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:  # the package raises bare Exception
                raise ModelError(f"{file}: cannot be read: {error}") from None
        else:
            backend = _convert(folder)
        named = _named_tokens(_read_json(folder / "special_tokens_map.json")) | _named_tokens(
            settings
        )
        return cls(backend, _find_template(folder, settings), named)

    def encode(self, text: str, rendered: bool = False) -> list[int]:
        """Token ids of a plain prompt; a BOS is added only if the tokenizer itself adds one, and
        never to the ``rendered`` text of a conversation, which has its own.

        The text of a special token in the prompt becomes that token. Other threads go on meanwhile:
        a long prompt takes seconds.
        """
        # Of the package's calls, those for a batch give the interpreter's lock back.
        [found] = self.backend.encode_batch_fast([text], add_special_tokens=not rendered)
        ids: list[int] = found.ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation. Raises as ``render_chat``."""
        return self.encode(self.render_chat(messages), rendered=True)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        variables: Mapping[str, Any] | None = None,
        generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as the text the model was trained on, up to where the answer begins, or
        without ``generation_prompt`` to the end of its last turn, or with
        ``continue_final_message`` (as transformers has it) to the end of that turn's content.

        ``variables`` are more of the template's, as ``{"enable_thinking": False}``; it ignores
        those that it does not know. Raises RequestError (400) without a chat template, for
        variables that are not the caller's to set, if the template refuses, or if it does not keep
        the message to be continued.
        """
        if self._template is None:
            reason = "the target model has no chat template, give it plain text (generate --raw)"
            raise RequestError(400, reason, "messages")
        if not messages:
            raise RequestError(400, "must hold at least one message", "messages")
        turns = [dict(m) for m in messages]
        if continue_final_message:
            turns[-1]["content"] += _CONTINUED
        own: dict[str, Any] = {
            "messages": turns,
            "tools": None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            **self.named_tokens,
        }
        taken = sorted(own.keys() & (variables or {}).keys())
        if taken:
            raise RequestError(400, f"cannot set {', '.join(taken)}", "chat_template_kwargs")
        try:
            text = self._template.render({**(variables or {}), **own})
        except Exception as error:  # the template is the model's, its variables are the client's
            raise RequestError(400, f"the chat template refused: {error}", "messages") from None
        return _up_to(text, messages[-1]["content"]) if continue_final_message else text

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than these will ``text`` be; found in no time."""
        if not self._longest:
            return 0
        kept = len(text) - sum(text.count(char) for char in self._lost)
        return -(-kept // self._longest)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of ``ids``, without special tokens unless ``special``."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=not special)
        return text

    def names(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's name of each token, which for most is not its text (``Ġthe``).

        Raises RequestError (400) for what is no token's id.
        """
        names: list[str] = []
        for token_id in ids:
            # The package takes 32 bits, without a sign.
            known = 0 <= token_id < 1 << 32
            name = self.backend.id_to_token(token_id) if known else None
            if name is None:
                raise RequestError(400, f"{token_id} is not the id of a token", "tokens")
            names.append(name)
        return names


def _up_to(rendered: str, message: str) -> str:
    """``rendered`` to where ``message``, marked with _CONTINUED, ends."""
    end = rendered.rfind(_CONTINUED.rstrip())
    if end < 0 or message.strip() not in rendered:
        reason = "the chat template does not keep the last message as it is"
        raise RequestError(400, reason, "continue_final_message")
    kept = rendered[:end]
    # A template that has trimmed the mark would have trimmed the message.
    return kept if rendered.startswith(_CONTINUED, end) else kept.rstrip()


def _bounds(backend: tokenizers.Tokenizer) -> tuple[int, str]:
    """Most characters of a text that become one token, and the characters that become none.

    (0, "") where that is not known: it is where a text is taken apart into bytes as it is. A name
    in the vocabulary then has a character a byte, no less than the characters it stands for, and
    of any other character than ASCII a byte at least is kept.
    """
    vocabulary = backend.get_vocab(with_added_tokens=True)
    splitter = backend.pre_tokenizer
    if backend.normalizer is not None or splitter is None:
        return 0, ""
    stripping = any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values())
    if stripping or b"ByteLevel" not in splitter.__getstate__():
        return 0, ""
    missing = [byte for char, byte in byte_of_char().items() if char not in vocabulary]
    if any(0x80 <= byte < 0xC0 for byte in missing):
        return 0, ""
    return max(map(len, vocabulary)), "".join(chr(byte) for byte in missing if byte < 0x80)


def byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    mapping = {chr(b): b for b in printable}
    return mapping | {chr(0x100 + i): b for i, b in enumerate(rest)}


def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise ModelError(f"the model's chat template is broken: {error}") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja's own filter escapes HTML characters, which models were not trained on
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _find_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if template is None:
        template = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _NAMED_TOKENS:
        value = settings.get(name)
        if isinstance(value, dict):  # a serialised AddedToken
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _convert(folder: Path) -> tokenizers.Tokenizer:
    check_tokenizer(folder)  # which transformers takes seconds to find out
    from transformers import AutoTokenizer

    try:
        converted: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers makes of a folder it cannot read
        reason = textwrap.shorten(str(error) or type(error).__name__, REASON_LENGTH)
        raise ModelError(f"{folder}: no usable tokenizer: {reason}") from None
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{folder}: its tokenizer has no fast implementation")
    return backend
