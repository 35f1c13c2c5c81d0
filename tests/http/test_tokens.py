"""``/tokenize`` and ``/detokenize`` as clients of vLLM's servers use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend_peer import MAX_LEN, pipeline
from tests.http.server import gateway_before
from tests.text.vocabularies import byte_level

KEY = "sesame"
TURNS = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("tokens")
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        pipeline(folder) as run,
        gateway_before(run, api_key=KEY) as (_, server),
        httpx.Client(base_url=server.url, headers=headers) as client,
    ):
        yield client


def ask(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_there_and_back(http: httpx.Client) -> None:
    ids = byte_level().encode("<s>hé")
    told = ask(http, "/tokenize", model="model", prompt="<s>hé")
    assert told == {
        "count": len(ids),
        "max_model_len": MAX_LEN,
        "tokens": ids,
        "token_strs": None,
    }
    assert ask(http, "/detokenize", tokens=ids) == {"prompt": "<s>hé"}
    assert ask(http, "/detokenize", tokens=[]) == {"prompt": ""}
    assert ask(http, "/tokenize", prompt="") == told | {"count": 0, "tokens": []}
    named = ask(http, "/tokenize", prompt="<s>hé", return_token_strs=True)
    assert named["token_strs"] == [byte_level().backend.id_to_token(i) for i in ids]


def test_a_conversation_is_tokenized_as_the_model_reads_it(http: httpx.Client) -> None:
    told = ask(http, "/tokenize", messages=TURNS, chat_template_kwargs={"thinking": True}, tools=[])
    assert told["tokens"] == byte_level().encode("<s>user: hi\n+", rendered=True)


def test_a_conversation_whose_last_message_goes_on(http: httpx.Client) -> None:
    told = ask(http, "/tokenize", messages=TURNS, continue_final_message=True)
    assert told["tokens"] == byte_level().encode("<s>user: hi", rendered=True)


def test_a_text_longer_than_the_context_has_tokens_too(http: httpx.Client) -> None:
    assert ask(http, "/tokenize", prompt="a b " * MAX_LEN)["count"] > MAX_LEN


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {}, 400, "exactly one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": TURNS}, 400, "exactly one of"),
        ("/tokenize", {"messages": []}, 400, "messages: must hold at least one"),
        ("/tokenize", {"messages": [{"role": "x", "content": ""}]}, 400, "messages.0.role"),
        ("/tokenize", {"messages": TURNS, "chat_template": "x"}, 400, "not supported"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, 400, "only with messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, 400, "only with messages"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "does not exist"),
        ("/detokenize", {}, 400, "tokens: is required"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [0, 99999]}, 400, "tokens: 99999 is not the id of a token"),
        ("/detokenize", {"tokens": [0], "model": "other"}, 404, "does not exist"),
    ],
)
def test_what_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_who_may_ask_and_how(http: httpx.Client, path: str) -> None:
    assert http.post(path, content=b"{}").status_code == 415
    assert http.post(path, json={}, headers={"Authorization": ""}).status_code == 401
    assert http.get(path).status_code == 405


def test_both_are_described(http: httpx.Client) -> None:
    described = http.get("/schema/openapi.json").json()
    for path, name in (("/tokenize", "TokenizeRequest"), ("/detokenize", "DetokenizeRequest")):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"]["$ref"] == f"#/components/schemas/{name}"
        assert name in described["components"]["schemas"]
