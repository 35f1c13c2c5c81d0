"""The prompt sets."""

from __future__ import annotations

import ast
import unicodedata

import pytest

from bench import prompts
from bench.texts import code
from ssd_pipe.errors import ConfigError


def test_sets_have_the_promised_sizes_and_distinct_prompts() -> None:
    for name, count in (("humaneval-style", 16), ("exactness", 50)):
        loaded = prompts.load(name, count)
        assert len({p.id for p in loaded}) == count
        assert len({(p.messages, p.text) for p in loaded}) == count
        with pytest.raises(ConfigError, match=f"has {count} prompts"):
            prompts.load(name, count + 1)
    with pytest.raises(ConfigError, match="'nothing' is none of: humaneval-style"):
        prompts.load("nothing", 1)


@pytest.mark.parametrize("name", code.TASKS)
def test_tasks_are_functions_with_a_docstring_and_no_body(name: str) -> None:
    functions = [n for n in ast.parse(code.TASKS[name]).body if isinstance(n, ast.FunctionDef)]
    assert len(functions) == 1
    assert ">>>" in (ast.get_docstring(functions[0]) or "")
    assert len(functions[0].body) == 1


def test_a_few_exactness_prompts_already_have_every_kind() -> None:
    assert {p.kind for p in prompts.load("exactness", 6)} == {
        "code",
        "question",
        "maths",
        "chat",
        "script",
        "raw",
    }


def test_scripts_are_what_they_are_meant_to_be() -> None:
    text = "".join(m for p in prompts.exactness() for m in p.messages)
    names = " ".join(unicodedata.name(c, "") for c in set(text))
    for script in ("CJK", "ARABIC", "CYRILLIC", "DEVANAGARI", "HIRAGANA", "HANGUL", "GREEK"):
        assert script in names
    assert "ROCKET" in names
    conversations = [p for p in prompts.exactness() if len(p.messages) > 1]
    assert len(conversations) >= 4
    assert all(len(p.messages) % 2 for p in conversations)  # the user speaks last
