"""Built-in prompt sets by name; every engine of a comparison gets the same token ids.

Published data sets are in ``datasets``, which has these as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from bench.texts import code, mixed
from ssd_pipe.errors import ConfigError, RequestError
from ssd_pipe.text.tokenizer import Tokenizer


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: a conversation that begins and ends with the user, or a raw ``text``."""

    id: str
    kind: str
    messages: tuple[str, ...] = ()
    text: str = ""

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids; a model whose chat template is missing or refuses gets plain lines."""
        if self.text:
            return tokenizer.encode(self.text)
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": m} for i, m in enumerate(self.messages)]
        try:
            return tokenizer.encode_chat(turns)
        except RequestError:
            return tokenizer.encode("\n".join(self.messages))


def load(name: str, count: int) -> list[Prompt]:
    """The first ``count`` prompts of a set. Raises ConfigError for an unknown set or too many."""
    if name not in SETS:
        raise ConfigError("--prompt-set", f"{name!r} is none of: {', '.join(SETS)}")
    prompts = SETS[name]()
    if not 1 <= count <= len(prompts):
        raise ConfigError("--prompts", f"set {name} has {len(prompts)} prompts, asked for {count}")
    return prompts[:count]


def humaneval_style() -> list[Prompt]:
    """Sixteen Python functions to complete, written for this project."""
    return [
        Prompt(id=name, kind="code", messages=(code.INSTRUCTION.format(task=task),))
        for name, task in code.TASKS.items()
    ]


def exactness() -> list[Prompt]:
    """Fifty prompts of six kinds, the kinds taking turns."""
    queues = {kind: of_kind(kind) for kind in KINDS}
    queues["raw"] = [Prompt(id=f"raw-{i}", kind="raw", text=t) for i, t in enumerate(mixed.RAW)]
    longest = max(map(len, queues.values()))
    return [queue[i] for i in range(longest) for queue in queues.values() if i < len(queue)]


def of_kind(kind: str) -> list[Prompt]:
    """The built-in prompts of one of ``KINDS``."""
    return [_prompt(kind, i, text) for i, text in enumerate(KINDS[kind])]


def _prompt(kind: str, number: int, text: str | list[str]) -> Prompt:
    messages = (text,) if isinstance(text, str) else tuple(text)
    return Prompt(id=f"{kind}-{number}", kind=kind, messages=messages)


KINDS: dict[str, Sequence[str | list[str]]] = {
    "code": mixed.CODE,
    "question": mixed.QUESTIONS,
    "maths": mixed.MATHS,
    "chat": mixed.CHAT,
    "script": mixed.SCRIPTS,
}
SETS: dict[str, Callable[[], list[Prompt]]] = {
    "humaneval-style": humaneval_style,
    "exactness": exactness,
    "builtin-code": partial(of_kind, "code"),
    "builtin-questions": partial(of_kind, "question"),
    "builtin-maths": partial(of_kind, "maths"),
    "builtin-chat": partial(of_kind, "chat"),
}
