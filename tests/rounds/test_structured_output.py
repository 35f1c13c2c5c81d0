"""Structured output: AR, SD and SSD against a fresh matcher for every token; what ends is valid."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import torch

from ipc.messages.sampling import NoiseKey, Processors
from models.config import ModelConfig
from models.registry import load_model
from models.sequence_batch import BatchRow, build_batch
from ssd_pipe.drafting import growth
from ssd_pipe.engine.step import FAILED
from ssd_pipe.hub import resolve
from ssd_pipe.sampling.grammar import Grammars, Unmaskable
from ssd_pipe.sampling.shared_noise import judge
from ssd_pipe.text.response_format import grammar_of
from ssd_pipe.text.tokenizer import Tokenizer
from tests.models.tiny import perturbed
from tests.pipelines import VOCAB_SIZE, byte_model
from tests.rounds.local_pipeline import LocalPipeline
from tests.rounds.test_rounds import settings

torch.set_num_threads(1)
EOS = 2
TOKENS = 180
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Alan", "Émile"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
FORMATS: dict[str, dict[str, Any]] = {
    "schema": {"type": "json_schema", "json_schema": {"schema": PERSON}},
    "regex": {"type": "regex", "regex": "[0-9]{3}-[a-f]{2,6}!"},
    "choice": {"type": "choice", "choice": ["yes", 'say "no"', "peut-être"]},
    "object": {"type": "json_object"},
    "grammar": {"type": "grammar", "grammar": 'start: ("yes" | "no") "," /[0-9]/ "!"'},
}
NOISE = {"greedy": NoiseKey(), "sampled": NoiseKey(seed=3, temperature=1.0, top_k=40)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bytes")
    target = byte_model(folder, "target")
    near = perturbed(target, folder / "near", 0.1)
    return {"target": target, "same": target, "near": near}


@pytest.fixture(scope="module")
def grammars(models: dict[str, Path]) -> Grammars:
    return Grammars.of_model(models["target"], VOCAB_SIZE)


def prompt_of(target: Path) -> list[int]:
    return Tokenizer.load(target).encode("Answer: ")


def key_of(kind: str, noise: str, prompt: list[int]) -> NoiseKey:
    base = NOISE[noise]
    rules = Processors(prompt_len=len(prompt), grammar=grammar_of(FORMATS[kind]))
    return NoiseKey(base.seed, base.temperature, base.top_p, base.top_k, base.min_p, rules)


@cache
def expected(target: Path, key: NoiseKey) -> list[int]:
    """Token by token, everything fed again, every mask from a matcher that starts afresh."""
    model = load_model(target, backend="reference")
    kv = model.make_kv(64, 4)
    tokenizer = llguidance.LLTokenizer(
        str(target / "tokenizer.json"), n_vocab=VOCAB_SIZE, eos_token=EOS
    )
    prompt = prompt_of(target)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + TOKENS:
        row = BatchRow(list(range(64)), 0, tokens, len(tokens) - 1)
        logits = model.logits(model.forward(build_batch([row], 4), kv))
        assert logits is not None
        assert key.processors is not None
        matcher = llguidance.LLMatcher(tokenizer, key.processors.grammar)
        assert matcher.consume_tokens(tokens[len(prompt) :])
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        masked = logits.masked_fill(torch.from_numpy(bits[:VOCAB_SIZE] == 0), -torch.inf)
        [(_, token)] = judge(masked, [[]], [key], [len(tokens)])
        tokens.append(token)
        if token == EOS:
            break
    return tokens[len(prompt) :]


def check_valid(kind: str, text: str) -> None:
    if kind == "regex":
        assert re.fullmatch(FORMATS["regex"]["regex"], text)
    elif kind == "grammar":
        assert re.fullmatch("(yes|no),[0-9]!", text)
    elif kind == "choice":
        assert text in FORMATS["choice"]["choice"]
    else:
        value = json.loads(text)
        assert isinstance(value, dict)
        if kind == "schema":
            assert value.keys() == set(PERSON["required"])
            assert value["name"] in ("Ada", "Alan", "Émile")
            assert isinstance(value["age"], int)
            assert 0 <= value["age"] <= 130
            assert isinstance(value["ok"], bool)
            assert len(value["tags"]) <= 2
            assert set(value["tags"]) <= {"a", "b"}


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_same_tokens_and_valid_where_they_end(
    models: dict[str, Path], grammars: Grammars, mode: Any, noise: str
) -> None:
    target = models["target"]
    prompt = prompt_of(target)
    pipeline = LocalPipeline(
        mode, target, models["near"], settings(), blocks=400, haste=0.3, grammars=grammars
    )
    keys = [key_of(kind, noise, prompt) for kind in FORMATS]
    for rid, key in enumerate(keys):
        pipeline.add(rid, prompt, TOKENS, key, [EOS])
    outputs = pipeline.run()
    tokenizer = Tokenizer.load(target)
    ended = set()
    for rid, kind in enumerate(FORMATS):
        assert outputs[rid] == expected(target, keys[rid])
        if pipeline.finish[rid] == "stop":
            ended.add(kind)
            check_valid(kind, tokenizer.decode(outputs[rid][:-1]))
    assert ended >= {"schema", "regex", "choice"}


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
def test_the_draft_sees_the_mask_everywhere(
    models: dict[str, Path],
    grammars: Grammars,
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
    rule: str,
) -> None:
    """A draft equal to the target, given the time, is accepted to the last token but those that
    would follow the end."""
    monkeypatch.setattr(growth, "MASK_SECONDS", 60.0)
    target = models["target"]
    prompt = prompt_of(target)
    config = settings(rule=rule, backup="jit")
    pipeline = LocalPipeline(mode, target, target, config, blocks=400, grammars=grammars)
    for rid, kind in enumerate(("schema", "object")):
        pipeline.add(rid, prompt, TOKENS, key_of(kind, "sampled", prompt), [EOS])
    pipeline.run()
    counters = pipeline.planner.counters
    assert counters.drafted - counters.accepted <= 4 * 2
    assert counters.accepted > 20


def test_without_time_for_masks_only_speed_is_lost(
    models: dict[str, Path], grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "MASK_SECONDS", 0.0)
    target = models["target"]
    prompt = prompt_of(target)
    key = key_of("schema", "sampled", prompt)
    pipeline = LocalPipeline("ssd", target, target, settings(), blocks=400, grammars=grammars)
    pipeline.add(0, prompt, TOKENS, key, [EOS])
    assert pipeline.run()[0] == expected(target, key)


@pytest.mark.parametrize("mode", ["ar", "ssd"])
def test_a_grammar_that_cannot_be_followed_fails_its_request_only(
    models: dict[str, Path], grammars: Grammars, mode: Any
) -> None:
    target = models["target"]
    prompt = prompt_of(target)
    good = key_of("regex", "greedy", prompt)
    broken = NoiseKey(processors=Processors(prompt_len=len(prompt), grammar="start: nowhere"))
    pipeline = LocalPipeline(
        mode, target, models["near"], settings(), blocks=400, grammars=grammars
    )
    pipeline.add(0, prompt, TOKENS, broken, [EOS])
    pipeline.add(1, prompt, TOKENS, good, [EOS])
    outputs = pipeline.run()
    assert (outputs[0], pipeline.finish[0]) == ([], FAILED)
    assert outputs[1] == expected(target, good)
    assert pipeline.target_blocks.num_free == 400


SPELLED = 6
"""Letters of the grammar below that can be followed; the seventh makes the matcher give up."""


def exploding_grammar() -> str:
    """Seven letters, after which more rules may apply at once than the matcher takes."""
    letters = "\n".join(f"s{i}: X s{i + 1}" for i in range(SPELLED))
    rules = "\n".join(f'z{i}: "a" "{chr(ord("b") + i % 20)}"' for i in range(2500))
    either = " | ".join(f"z{i}" for i in range(2500))
    return f"start: s0\n{letters}\ns{SPELLED}: X w\nw: {either}\nX: /[a-z]/\n{rules}"


@pytest.mark.parametrize("rule", ["shared_noise", "rejection"])
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_nothing_is_emitted_where_the_grammar_is_given_up(
    models: dict[str, Path], grammars: Grammars, mode: Any, rule: str
) -> None:
    """In the middle of an accepted chain too: same tokens in every mode, all of them allowed."""
    target = models["target"]
    tokenizer = Tokenizer.load(target)
    prompt = prompt_of(target)
    processors = Processors(prompt_len=len(prompt), grammar=exploding_grammar())
    key = NoiseKey(seed=5, temperature=1.0, processors=processors)
    for max_tokens, finish in ((TOKENS, FAILED), (SPELLED + 1, "length")):
        pipeline = LocalPipeline(
            mode, target, models["same"], settings(rule=rule), blocks=400, grammars=grammars
        )
        pipeline.add(0, prompt, max_tokens, key, [EOS])
        output = pipeline.run()[0]
        assert pipeline.finish[0] == finish
        assert re.fullmatch(f"[a-z]{{{SPELLED + 1}}}", tokenizer.decode(output))
        assert pipeline.target_blocks.num_free == 400


def test_a_vocabulary_that_cannot_go_on_fails_its_request(models: dict[str, Path]) -> None:
    """Where the grammar wants a character that no token of the model's can write."""
    target = models["target"]
    prompt = prompt_of(target)
    narrow = 3 + 100  # tokens of the special ones and the first hundred bytes
    grammars = Grammars.of_model(target, narrow)
    grammar = llguidance.LLMatcher.grammar_from_regex("a")
    key = NoiseKey(processors=Processors(prompt_len=len(prompt), grammar=grammar))
    pipeline = LocalPipeline("ar", target, target, settings(), blocks=400, grammars=grammars)
    pipeline.add(0, prompt, TOKENS, key, [EOS])
    assert (pipeline.run()[0], pipeline.finish[0]) == ([], FAILED)


def test_a_long_chain_of_references_does_not_end_the_process(grammars: Grammars) -> None:
    """The library goes one deeper for each, when it checks the schema and when it compiles it."""
    parts = {f"{n}": {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(1400)}
    schema = {"$ref": "#/$defs/0", "$defs": parts | {"1400": {}}}
    grammar = grammar_of({"type": "json_schema", "json_schema": {"schema": schema}})
    assert grammars.start(grammar).mask([])


def test_a_schema_that_no_text_matches_says_so(grammars: Grammars) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
    state = grammars.start(grammar_of(schema))
    with pytest.raises(Unmaskable, match="no text can match it"):
        state.mask([])
    assert "no text" in state.failure


def test_an_ambiguous_grammar_fails_its_own_request_and_soon() -> None:
    """It may not take the time of all others; llguidance's own limit is ten times as far off."""
    folder = resolve("smollm2-135m-instruct")
    grammars = Grammars.of_model(folder, ModelConfig.from_folder(folder).vocab_size)
    assert grammars.start(grammar_of(FORMATS["schema"])).mask([])
    with pytest.raises(Unmaskable, match=r"^parser error: Too many items"):
        grammars.start("start: s\ns: s s s s | /[a-z ]/ | ").mask([])
