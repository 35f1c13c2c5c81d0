"""Sampling, stops, logprobs and structured output through running pipelines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_pipe.client import Client, Result
from ssd_pipe.errors import RequestError
from ssd_pipe.params import SamplingParams, derived_seed
from ssd_pipe.text.tokenizer import Tokenizer
from tests.test_pipeline import pipeline

MODES = ["ar", "ssd"]  # tests/rounds has all of them, and both rules
SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 40, "ignore_eos": True}
SHAPED = SAMPLED | {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {70: 4.0, 71: -50.0},
}


@pytest.fixture(scope="module")
def clients(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Client]]:
    folder = tmp_path_factory.mktemp("f")
    shm = folder / "shm"
    shm.mkdir()
    with (
        pipeline(pair, folder, shm, "ar") as ar,
        pipeline(pair, folder, shm, "ssd") as ssd,
    ):
        yield {"ar": ar.client, "ssd": ssd.client}


def everywhere(clients: dict[str, Client], prompt: str = "x = [", **params: object) -> Result:
    """The answer, which is the same in every mode: text, ids, finish reason, logprobs."""
    answers = [clients[mode].generate(prompt, SamplingParams(**params)) for mode in MODES]
    first = answers[0]
    for other in answers[1:]:
        assert (other.text, other.token_ids) == (first.text, first.token_ids)
        assert other.finish_reason == first.finish_reason
        assert [e.token_id for e in other.logprobs] == [e.token_id for e in first.logprobs]
        assert [e.logprob for e in other.logprobs] == pytest.approx(
            [e.logprob for e in first.logprobs], abs=1e-3
        )
    return first


def test_penalties_and_bias_give_the_same_tokens_in_every_mode(clients: dict[str, Client]) -> None:
    shaped = everywhere(clients, **SHAPED)
    assert shaped.token_ids != everywhere(clients, **SAMPLED).token_ids
    assert 71 not in shaped.token_ids


def test_only_allowed_ids_and_no_bad_words(clients: dict[str, Client]) -> None:
    few = everywhere(clients, **SAMPLED, allowed_token_ids=(70, 71, 80, 90))
    assert set(few.token_ids) == {70, 71, 80, 90}
    wordy = SAMPLED | {"allowed_token_ids": None, "logit_bias": {70: 9.0, 71: 9.0, 80: 9.0}}
    text = everywhere(clients, **wordy).text
    pairs = sorted({text[i : i + 2] for i in range(len(text) - 1) if text[i : i + 2].isalnum()})
    bad = tuple(pairs[:3])
    assert len(bad) == 3
    other = everywhere(clients, **wordy, bad_words=bad)
    assert not any(word in other.text for word in bad)
    assert len(other.token_ids) == SAMPLED["max_tokens"]


def test_logprobs_come_one_per_token(clients: dict[str, Client]) -> None:
    result = everywhere(clients, **SHAPED, logprobs=3)
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    for entry in result.logprobs:
        assert len(entry.top) == 3
        best = [other.logprob for other in entry.top]
        assert best == sorted(best, reverse=True)
        assert (entry.rank == 1) == (entry.token_id == entry.top[0].token_id)
        assert entry.logprob <= best[0] + 1e-6
    assert everywhere(clients, **SAMPLED).logprobs == ()


@pytest.mark.parametrize("place", range(2, 9))
def test_stop_text_tokens_logprobs_and_usage_agree(
    clients: dict[str, Client], pair: tuple[Path, Path], place: int
) -> None:
    """A stop of two letters (two tokens) that ends at each place of the first rounds."""
    letters = Tokenizer.load(pair[0]).encode("abcdefghijklmnopqrstuvwxyz")
    params = SAMPLED | {"logit_bias": dict.fromkeys(letters, 20.0), "logprobs": 0}
    whole = everywhere(clients, **params)
    assert re.fullmatch("[a-z]{40}", whole.text)
    stop = whole.text[place - 1 : place + 1]
    end = whole.text.index(stop) + 2
    for include in (False, True):
        stopped = params | {"stop": (stop,), "include_stop_str_in_output": include}
        result = everywhere(clients, **stopped)
        assert result.finish_reason == "stop"
        assert result.text == whole.text[: end if include else end - 2]
        assert result.token_ids == whole.token_ids[:end]
        assert len(result.logprobs) == end
        for client in clients.values():
            metrics = client.generate("x = [", SamplingParams(**stopped)).metrics
            assert metrics is not None
            assert metrics.output_tokens == end
            if metrics.accepted_mean is not None:
                assert metrics.drafted_tokens >= metrics.accepted_tokens
                assert metrics.rounds > 0


def test_a_stop_text_gives_its_blocks_back(clients: dict[str, Client]) -> None:
    for client in clients.values():
        counters = client.status().counters
        assert counters["free_blocks"] == counters["total_blocks"]


def test_min_tokens_hold_back_ids_and_texts(clients: dict[str, Client]) -> None:
    params = SAMPLED | {"logit_bias": {70: 100.0}, "stop_token_ids": (70,)}
    assert everywhere(clients, **params).token_ids == (70,)
    later = everywhere(clients, **params, min_tokens=9)
    assert later.token_ids.index(70) == 9 == len(later.token_ids) - 1
    assert later.finish_reason == "stop"


def test_several_answers_are_those_of_the_derived_seeds(clients: dict[str, Client]) -> None:
    alone = [
        everywhere(clients, **SAMPLED | {"seed": derived_seed(7, index)}) for index in range(3)
    ]
    together = everywhere(clients, **SAMPLED, n=3)
    assert [choice.text for choice in together.choices] == [answer.text for answer in alone]
    assert len({choice.token_ids for choice in together.choices}) == 3
    assert (together.text, together.token_ids) == (alone[0].text, alone[0].token_ids)
    assert together.metrics is not None
    assert together.metrics.output_tokens == 3 * 40
    assert together.metrics.prompt_tokens == 5


def test_streamed_text_is_the_decode_of_the_tokens(
    clients: dict[str, Client], pair: tuple[Path, Path]
) -> None:
    """Each token is a byte, biased so that characters of one to four bytes come out."""
    tokenizer = Tokenizer.load(pair[0])
    text = "aé你🙂न" * 3
    wanted = tokenizer.encode(text)
    bias = dict.fromkeys(wanted, 9.0)
    for mode in MODES:
        params = SamplingParams(**SAMPLED | {"max_tokens": 90, "logit_bias": bias})
        chunks = list(clients[mode].stream("नमस्ते 🙂 你好", params))
        ids = [token for chunk in chunks for token in chunk.token_ids]
        whole = "".join(chunk.text for chunk in chunks)
        assert whole == tokenizer.decode(ids)
        # nothing is shown before it is certain: every prefix of the stream is one of the text
        shown = ""
        for chunk in chunks:
            shown += chunk.text
            assert whole.startswith(shown)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output_is_valid(clients: dict[str, Client], temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    params = {"temperature": temperature, "seed": 3, "max_tokens": 150}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    result = everywhere(clients, **params, response_format=wanted, logprobs=0)
    assert result.finish_reason == "stop"
    value = json.loads(result.text)
    assert isinstance(value["ok"], bool)
    assert value["kind"] in ("a", "b")
    assert len(result.logprobs) == len(result.token_ids)
    wanted = {"type": "regex", "regex": "[0-9]{2}:[0-9]{2}"}
    assert re.fullmatch(wanted["regex"], everywhere(clients, **params, response_format=wanted).text)
    wanted = {"type": "choice", "choice": ["yes", "no"]}
    assert everywhere(clients, **params, response_format=wanted).text in ("yes", "no")


def test_a_bad_schema_is_refused_and_the_pipeline_lives(clients: dict[str, Client]) -> None:
    for client in clients.values():
        wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}
        with pytest.raises(RequestError, match="objekt") as caught:
            client.generate("x", SamplingParams(response_format=wanted))
        assert caught.value.code == 400
        assert client.generate("x", SamplingParams(max_tokens=3, ignore_eos=True)).text
