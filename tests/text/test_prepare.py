"""What a request must be like, and what becomes of its sampling settings."""

import pytest
from msgspec.structs import replace

from ipc.messages.client import ChatMessage, Submit
from ipc.messages.sampling import NoiseKey
from ssd_pipe.errors import RequestError
from ssd_pipe.params import SamplingParams
from ssd_pipe.text.prepare import LONG_TEXT, PART_TEXT, Preparer
from ssd_pipe.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level

VOCAB = byte_level().vocab_size
PREPARER = Preparer(byte_level(), [2], VOCAB, 64)


def schema(value):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}


def prepare(preparer=PREPARER, **params):
    return preparer.prepare(Submit(id="a", prompt="x", params=SamplingParams(**params)))


ENDS = ("allowed_token_ids", "every one of them ends")
GBNF = {"type": "grammar", "grammar": 'root ::= "a"'}


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens = 8"),
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "(0, 100]"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty", "inf"),
        ({"presence_penalty": 2.5}, "presence_penalty", "[-2, 2]"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty", "[-2, 2]"),
        ({"logit_bias": {3: 101.0}}, "logit_bias", "[-100, 100]"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias", "[-100, 100]"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias", str(VOCAB)),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "-1"),
        ({"logit_bias": dict.fromkeys(range(2000), 0.0)}, "logit_bias", "1024"),
        ({"logprobs": 21}, "logprobs", "0..20"),
        ({"logprobs": -1}, "logprobs", "0..20"),
        ({"allowed_token_ids": ()}, "allowed_token_ids", "1 to 1024"),
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids", str(VOCAB)),
        ({"allowed_token_ids": (5,), "bad_words": ("a",)}, "allowed_token_ids", "bad_words"),
        ({"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 1}, *ENDS),
        ({"bad_words": ("a",) * 65}, "bad_words", "64"),
        ({"bad_words": (" ",)}, "bad_words", "spaces"),
        ({"response_format": schema({}), "bad_words": ("a",)}, "bad_words", "response_format"),
        ({"n": 0}, "n", "1..128"),
        ({"n": 129}, "n", "1..128"),
        (
            {"response_format": {}},
            "response_format.type",
            "json_schema, regex, choice, grammar, got n",
        ),
        ({"response_format": GBNF}, "response_format.grammar", "Lark"),
        ({"response_format": GBNF | {"grammar": "start: x"}}, "response_format.grammar", "unknown"),
        ({"response_format": GBNF | {"grammar": "{}"}}, "response_format.grammar", "Lark"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "objekt"}}},
            "response_format",
            "objekt",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": schema({"type": "objekt"})}, "response_format.json_schema", "objekt"),
        ({"response_format": schema({"$ref": "#/no"})}, "response_format.json_schema", "/no"),
        ({"response_format": schema({"pattern": "("})}, "response_format.json_schema", "unclosed"),
        ({"response_format": schema(3)}, "response_format.json_schema.schema", "3"),
        ({"response_format": schema({"const": "a" * 70_000})}, "response_format", "65536"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": {"type": "regex"}}, "response_format.regex", "text"),
        (
            {"response_format": {"type": "regex", "regex": "(a"}},
            "response_format.regex",
            "unclosed",
        ),
        ({"response_format": {"type": "choice", "choice": []}}, "response_format.choice", "empty"),
        (
            {"response_format": {"type": "choice", "choice": ["a", 3]}},
            "response_format.choice",
            "texts",
        ),
        ({"response_format": schema({}), "ignore_eos": True}, "ignore_eos", "response_format"),
        ({"response_format": schema({}), "min_tokens": 2}, "min_tokens", "response_format"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(params, field, words):
    with pytest.raises(RequestError) as caught:
        prepare(**params)
    assert (caught.value.code, caught.value.field) == (400, field)
    assert words in str(caught.value)


def test_a_model_without_eos_has_no_structured_output():
    preparer = Preparer(byte_level(), [], VOCAB, 64)
    with pytest.raises(RequestError, match="end-of-sequence"):
        prepare(preparer, response_format=schema({}))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"logit_bias": {}, "response_format": {"type": "text"}, "presence_penalty": 0.0},
        {"min_tokens": 3, "ignore_eos": True},  # nothing could end it anyway
    ],
)
def test_plain_requests_have_no_processors(params):
    assert prepare(**params).keys == [NoiseKey()]


def test_stop_ids_are_every_eos_and_the_requests_own():
    preparer = Preparer(byte_level(), [2, 0], VOCAB, 64)
    assert prepare(preparer, stop_token_ids=(5, 2)).stop_ids == [2, 0, 5]
    assert prepare(preparer, stop_token_ids=(5,), ignore_eos=True).stop_ids == [5]
    [key] = prepare(preparer, stop_token_ids=(5,), min_tokens=4).keys
    assert (key.processors.min_tokens, key.processors.stop_ids) == (4, (2, 0, 5))


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_object"},
        {"type": "json_object", "schema": {"type": "integer"}},
        {"type": "grammar", "grammar": 'start: "a" b\nb: /[0-9]+/'},
        schema({}),
        schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
        {"type": "regex", "regex": r"\\d{3}/[a-z]*"},
        {"type": "choice", "choice": ["yes", 'say "no"', "né\n", "/"]},
    ],
)
def test_formats_that_are_served(wanted):
    [key] = prepare(response_format=wanted).keys
    assert key.processors.grammar


@pytest.mark.parametrize("begun", [False, True])
def test_what_has_a_format_has_no_thought(begun):
    template = "{{ messages[0].content }}" + "{# </think> #}" + "<think>" * begun
    preparer = Preparer(Tokenizer(byte_level().backend, template), [2], VOCAB, 64)
    for wanted, expected in (({"type": "text"}, begun), ({"type": "json_object"}, None)):
        params = SamplingParams(response_format=wanted)
        submit = Submit(id="a", messages=(ChatMessage("user", "x"),), params=params)
        assert preparer.prepare(submit).thinking is expected


def test_unlimited_sampling_seeds_differ_between_requests():
    params = {"temperature": 1.0, "n": 2}
    keys = prepare(**params).keys + prepare(**params).keys
    assert len({key.seed for key in keys}) == 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"enable_thinking": False, "date": "x" * 99}, False),
        ({"documents": [{"text": "x" * LONG_TEXT}]}, True),
        ({"a": {"x" * LONG_TEXT: 1}}, True),
        ({"a": [[0] * LONG_TEXT]}, True),
    ],
)
def test_what_a_template_is_given_counts_where_an_event_loop_would_wait(given, expected):
    hello = (ChatMessage("user", "hello"),)
    submit = Submit(id="a", messages=hello, chat_template_kwargs=given)
    assert PREPARER.is_long(submit) is expected
    # together with the conversation
    almost = (ChatMessage("user", "x" * (LONG_TEXT - 4 - PART_TEXT)),)
    assert not PREPARER.is_long(Submit(id="a", messages=almost))
    words = SamplingParams(bad_words=("x" * 256,) * 64)
    assert PREPARER.is_long(Submit(id="a", prompt="a", params=words))
    submit = Submit(id="a", messages=almost, chat_template_kwargs={"date": 1})
    assert PREPARER.is_long(submit)


def test_a_limit_without_room_is_told_with_the_room_and_its_reason():
    fits = Submit(id="a", prompt="abc", params=SamplingParams(max_tokens=61), must_fit=True)
    tokens = len(PREPARER.prepare(fits).tokens)
    wrong = replace(fits, params=SamplingParams(max_tokens=65))
    with pytest.raises(RequestError) as caught:
        PREPARER.prepare(wrong)
    assert str(caught.value) == (
        f"max_tokens: must be at most {64 - tokens} (max_model_len = 64 less the prompt's "
        f"{tokens} tokens), got 65"
    )
    assert (caught.value.code, caught.value.field) == (400, "max_tokens")
    assert PREPARER.prepare(replace(wrong, must_fit=False)).max_tokens == 64 - tokens


def test_a_schema_beside_json_object_is_followed():
    [plain] = prepare(response_format={"type": "json_object"}).keys
    [key] = prepare(response_format={"type": "json_object", "schema": {"const": "x"}}).keys
    assert "const" in key.processors.grammar
    assert key != plain


@pytest.mark.parametrize(
    ("said", "thinking"), [("<think>so", True), ("<think>so</think> a", False), ("a", False)]
)
def test_a_thought_that_the_last_message_began_goes_on(said, thinking):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"
    preparer = Preparer(Tokenizer(byte_level().backend, template), [2], VOCAB, 64)
    submit = Submit(
        id="a",
        messages=(ChatMessage("assistant", said),),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert preparer.prepare(submit).thinking is thinking


def test_bad_words_are_told_by_their_tokens_with_and_without_a_space():
    tokenizer = byte_level()
    [key] = prepare(bad_words=("the", " fox", "zq", "the")).keys
    the, spaced = (tuple(tokenizer.encode(text, rendered=True)) for text in ("the", " the"))
    assert key.processors.bad[0] == the
    assert len(the) == len(spaced)
    assert key.processors.bad[1] == spaced
    assert tuple(tokenizer.encode("fox", rendered=True)) in key.processors.bad
    assert tuple(tokenizer.encode("zq", rendered=True)) in key.processors.bad
    assert len(set(key.processors.bad)) == len(key.processors.bad)
