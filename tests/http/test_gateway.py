"""The gateway before a real pipeline, used by the openai package as it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from procs.http.parse import MAX_CHOICES
from procs.http.schemas import ChatRequest, CompletionRequest
from ssd_pipe.client import Client
from ssd_pipe.errors import RequestError
from tests.http.server import KEY, Server, whole_pipeline
from tests.waiting import wait_for

MAX_BODY = 64 * 1024
MODEL = "target"
CONTEXT = 512  # of tests.pipelines' models
TOOL = {"type": "function", "function": {"name": "f"}}
HELLO = [{"role": "user", "content": "hello"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Client]]:
    # Rounds must happen however little they pay with models this small.
    limits: dict[str, Any] = {"scheduler.max_waiting": 32, "speculation.backup": "jit"}
    limits["gateway.max_body_bytes"] = MAX_BODY
    folder = tmp_path_factory.mktemp("gateway")
    with (
        whole_pipeline(folder, **limits, **{"gateway.api_key": KEY}) as (supervisor, server),
        Client(supervisor.endpoint) as client,
    ):
        yield server, client


@pytest.fixture
def server(run: tuple[Server, Client]) -> Server:
    return run[0]


@pytest.fixture
def pipe(run: tuple[Server, Client]) -> Client:
    return run[1]


@pytest.fixture
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_models(api: openai.OpenAI) -> None:
    (card,) = api.models.list().data
    assert card.id == MODEL
    assert api.models.retrieve(MODEL) == card
    with pytest.raises(openai.NotFoundError) as caught:
        api.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_every_form_of_prompt_gives_what_the_pipeline_gives(
    api: openai.OpenAI, pipe: Client
) -> None:
    expected = pipe.generate("hello", max_tokens=12).text
    other = pipe.generate("other", max_tokens=12).text
    ids, other_ids = ([3 + byte_rank(b) for b in text.encode()] for text in ("hello", "other"))

    def texts(prompt: Any) -> list[str]:
        answer = api.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
        assert [c.index for c in answer.choices] == list(range(len(answer.choices)))
        return [c.text for c in answer.choices]

    assert texts("hello") == texts(ids) == texts(["hello"]) == texts([ids]) == [expected]
    assert texts(["hello", "other"]) == texts([ids, other_ids]) == [expected, other]


def byte_rank(value: int) -> int:
    """Place of a byte in the byte-level alphabet as tests.pipelines orders it."""
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    (piece,) = split.pre_tokenize_str(chr(value))
    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(piece[0])


def test_chat_whole_and_streamed_say_the_same(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 5, "max_tokens": 40}
    whole = api.chat.completions.create(**asked)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    chunks = list(
        api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in parts) == (
        whole.choices[0].message.content
    )
    finishes = [p.choices[0].finish_reason for p in parts]
    assert finishes == [None] * (len(parts) - 1) + [whole.choices[0].finish_reason]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert len({c.id for c in chunks}) == 1
    assert all(p.usage is None for p in parts)


def test_every_chunk_tells_the_usage_where_that_is_asked_for(api: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    said: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "stream": True, "n": 2}
    said |= {"stream_options": options, "extra_body": {"ignore_eos": True}}
    chats = api.chat.completions.create(**said, messages=HELLO)
    texts = api.completions.create(**said, prompt=["hello", "hi"], echo=True)
    lengths = (("hello", "hello", "hi", "hi"), (None, None))
    for chunks, prompts in zip((texts, chats), lengths, strict=True):
        *parts, last = list(chunks)
        assert last.usage.completion_tokens == 9 * len(prompts)
        counts: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
        for part in parts:
            index = part.choices[0].index
            if part.usage is None:  # an echo before anything of its prompt has come
                assert prompts[index] is not None
                assert not counts[index]
                continue
            prompt = last.usage.prompt_tokens if prompts[index] is None else len(prompts[index])
            counts[index].append(part.usage.completion_tokens)
            assert part.usage.prompt_tokens == prompt
            assert part.usage.total_tokens == prompt + counts[index][-1]
        for values in counts.values():
            assert values == sorted(values)
            assert values[-1] == 9


def test_the_last_message_goes_on(server: Server, pipe: Client) -> None:
    """The template of these models ends a turn with a line's end."""
    turns = [*HELLO, {"role": "assistant", "content": "I am "}]
    expected = pipe.generate("<s>user: hello\n<s>assistant: I am ", max_tokens=8).text
    asked: dict[str, Any] = {"messages": turns, "max_tokens": 8, "temperature": 0}
    for more in ({}, {"add_generation_prompt": False}):
        reply = server.post(CHAT, **asked, **more, continue_final_message=True)
        assert reply.json["choices"][0]["message"]["content"] == expected
    ended = server.post(CHAT, **asked, add_generation_prompt=False).json["usage"]["prompt_tokens"]
    assert ended == reply.json["usage"]["prompt_tokens"] + 1
    with pytest.raises(RequestError, match="continue_final_message: only without"):
        pipe.generate(messages=turns, continue_final_message=True)
    with pytest.raises(RequestError, match="add_generation_prompt: only with messages"):
        pipe.generate("x", add_generation_prompt=False)


def test_completions_stream(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["ab", "xyz"], "temperature": 0}
    whole = api.completions.create(**asked, echo=True)
    texts = {0: "", 1: ""}
    for chunk in api.completions.create(**asked, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {c.index: c.text for c in whole.choices}
    assert texts[0].startswith("ab")
    assert texts[1].startswith("xyz")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 32)


def test_token_ids_come_where_they_are_asked_for(api: openai.OpenAI, pipe: Client) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "hello", "temperature": 0}
    more = {"return_token_ids": True}
    expected = list(pipe.generate("hello", max_tokens=16).token_ids)
    whole = api.completions.create(**asked, extra_body=more)
    assert whole.choices[0].to_dict()["token_ids"] == expected
    streamed = []
    for chunk in api.completions.create(**asked, extra_body=more, stream=True):
        streamed += chunk.choices[0].to_dict()["token_ids"]
    assert streamed == expected
    assert "token_ids" not in api.completions.create(**asked).choices[0].to_dict()


def test_n_answers_differ_and_come_back_with_the_seed(api: openai.OpenAI) -> None:
    def texts(**more: Any) -> list[str | None]:
        answer = api.chat.completions.create(
            model=MODEL, messages=HELLO, max_completion_tokens=24, **more
        )
        return [c.message.content for c in answer.choices]

    three = texts(n=3, seed=7)
    assert len(set(three)) == 3
    assert texts(n=3, seed=7) == three
    assert texts(seed=7) == three[:1]
    assert texts() != texts()


def test_messages_in_all_their_forms(api: openai.OpenAI) -> None:
    def text(messages: Any) -> str | None:
        answer = api.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=16
        )
        return answer.choices[0].message.content

    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert text([{"role": "user", "content": parts}]) == text(
        [{"role": "user", "content": "hel\nlo"}]
    )
    system, developer = ([{"role": r, "content": "x"}, *HELLO] for r in ("system", "developer"))
    assert text(system) == text(developer) != text(HELLO)
    empty = text([*HELLO, {"role": "assistant", "content": ""}, *HELLO])
    for silent in ({"role": "assistant", "content": None}, {"role": "assistant"}):
        assert text([*HELLO, silent, *HELLO]) == empty
    said = api.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
    answer = said.choices[0].message.model_dump()
    assert text([*HELLO, answer, *HELLO]) == text(
        [*HELLO, {"role": "assistant", "content": answer["content"]}, *HELLO]
    )


def test_stop_text(api: openai.OpenAI, pipe: Client) -> None:
    text = pipe.generate("hello", max_tokens=40, temperature=1.0, seed=3, ignore_eos=True).text
    stop = next(c for c in text[8:] if c.isascii() and c.isprintable())
    answer = api.completions.create(
        model=MODEL,
        prompt="hello",
        max_tokens=40,
        seed=3,
        stop=stop,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_describe_the_tokens_of_the_answer(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    data = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert data.decode(errors="replace") == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        # Greedy: the choice is the most likely token.
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ...),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": "5"}, "max_tokens"),
        (CHAT, {"messages": HELLO, "temperature": -1}, "temperature"),
        (CHAT, {"messages": HELLO, "top_p": 0}, "top_p"),
        (CHAT, {"messages": HELLO, "seed": 2**70}, "seed"),
        (CHAT, {"messages": HELLO, "stop": [""]}, "stop"),
        (CHAT, {"messages": HELLO, "n": 0}, "n"),
        (CHAT, {"messages": HELLO, "n": MAX_CHOICES + 1}, "n"),
        (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "audio": {"voice": "x"}}, "audio"),
        (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}, "tools"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "guided_regex": "(a"}, "guided_regex"),
        (CHAT, {"messages": HELLO, "guided_json": {"type": "objekt"}}, "guided_json"),
        (CHAT, {"messages": HELLO, "guided_json": "{"}, "guided_json"),
        (CHAT, {"messages": HELLO, "json_schema": "3"}, "json_schema"),
        (CHAT, {"messages": HELLO, "guided_choice": []}, "guided_choice"),
        (CHAT, {"messages": HELLO, "guided_choice": "a"}, "guided_choice"),
        (CHAT, {"messages": HELLO, "guided_json": {}, "regex": "a"}, "regex"),
        (CHAT, {"messages": HELLO, "grammar": 'root ::= "a"'}, "grammar"),
        (CHAT, {"messages": HELLO, "ebnf": "start: nowhere"}, "ebnf"),
        (CHAT, {"messages": HELLO, "structured_outputs": {}}, "structured_outputs"),
        (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "("}}, ...),
        (CHAT, {"messages": HELLO, "structured_outputs": {"structural_tag": "x"}}, ...),
        (CHAT, {"messages": HELLO, "structured_outputs": {"other": 1}}, "structured_outputs"),
        (CHAT, {"messages": HELLO, "structured_outputs": {"json": {}, "choice": ["a"]}}, ...),
        (CHAT, {"messages": HELLO, "response_format": {}}, "response_format.type"),
        (CHAT, {"messages": HELLO, "echo": True}, "echo"),
        (
            CHAT,
            {
                "messages": HELLO,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            },
            "spaces_between_special_tokens",
        ),
        (CHAT, {"messages": HELLO, "seed": -2}, "seed"),
        (CHAT, {"messages": HELLO, "max_tokens": 1.5}, "max_tokens"),
        (CHAT, {"messages": HELLO, "repeat_penalty": 1.1}, "repeat_penalty"),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (COMPLETIONS, {"prompt": "x", "add_special_tokens": False}, "add_special_tokens"),
        (COMPLETIONS, {}, "prompt"),
        (
            CHAT,
            {
                "messages": HELLO,
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
        (CHAT, {"messages": HELLO, "chat_template": "{{ messages }}"}, "chat_template"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": 1}, "chat_template_kwargs"),
        (
            CHAT,
            {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
        ),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        (CHAT, {"messages": HELLO, "max_tokens": CONTEXT}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": CONTEXT}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "xy", "max_tokens": CONTEXT - 1}, "max_tokens"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt.0"),
        (COMPLETIONS, {"prompt": [2**80]}, "prompt.0"),
        (COMPLETIONS, {"prompt": "x", "stop": [1]}, "stop.0"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": [100000]}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 600}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 1, "echo": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_wrong_request_gets_400_naming_the_field(
    server: Server, path: str, fields: dict[str, Any], param: Any, streamed: bool
) -> None:
    if streamed and param == "stream_options":
        return
    reply = server.post(path, model=MODEL, **fields, **({"stream": True} if streamed else {}))
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    if param is not ...:
        assert reply.error["param"] == param
        assert param.rpartition(".")[2] in reply.error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "x" * 50_000},
        {"model": "x" * 50_000},
        {"tool_choice": "none", "logit_bias": {"x" * 50_000: 1}},
        {"messages": [{"role": "x" * 50_000, "content": ""}]},
    ],
)
def test_an_error_does_not_send_long_values_back(server: Server, fields: dict[str, Any]) -> None:
    reply = server.post(CHAT, **({"messages": HELLO} | fields))
    assert reply.status in (400, 404)
    assert len(reply.body) < 3000


def test_what_changes_nothing_is_accepted(server: Server) -> None:
    ignored = {"user": "u", "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": False}
    ignored |= {"reasoning_effort": "low", "verbosity": "low", "service_tier": "auto", "other": 1}
    neutral = {
        "tools": None,
        "tool_choice": "auto",
        "top_k": -1,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": False,
        "repeat_penalty": 1.0,
        "mirostat": 0,
        "echo": False,
        "seed": -1,
        "grammar": None,
        "logprobs": False,
        "top_logprobs": 0,
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
    }
    reply = server.post(CHAT, model=MODEL, messages=HELLO, max_tokens=2, **ignored, **neutral)
    assert reply.status == 200, reply.body
    plain = server.post(CHAT, model=MODEL, messages=HELLO, max_tokens=8, seed=1)
    more = {"tools": [TOOL], "tool_choice": "none", "stream_options": None, "reasoning": {}}
    reply = server.post(CHAT, model=MODEL, messages=HELLO, max_tokens=8, seed=1, **more)
    assert reply.json["choices"] == plain.json["choices"]


def test_an_answer_fills_the_context_unless_told_otherwise(server: Server) -> None:
    wanted = {"model": MODEL, "prompt": "xy", "ignore_eos": True}
    whole = server.post(CHAT, model=MODEL, messages=HELLO, ignore_eos=True).json
    assert whole["usage"]["total_tokens"] == CONTEXT
    assert whole["choices"][0]["finish_reason"] == "length"
    fits = server.post(COMPLETIONS, **wanted, max_tokens=CONTEXT - 2).json
    assert fits["usage"]["total_tokens"] == CONTEXT
    error = server.post(COMPLETIONS, **wanted, max_tokens=CONTEXT - 1).error
    assert error["message"] == (
        f"max_tokens: must be at most {CONTEXT - 2} (max_model_len = {CONTEXT} less the prompt's "
        f"2 tokens), got {CONTEXT - 1}"
    )
    chat = server.post(CHAT, model=MODEL, messages=HELLO, max_completion_tokens=CONTEXT).error
    assert chat["message"].startswith("max_completion_tokens: must be at most ")


def test_variables_of_the_chat_template(server: Server, pipe: Client) -> None:
    def text(**more: Any) -> str:
        reply = server.post(CHAT, model=MODEL, messages=HELLO, max_tokens=8, temperature=0, **more)
        return str(reply.json["choices"][0]["message"]["content"])

    assert text(chat_template_kwargs={"unknown": 1}) == text()
    thinking = text(chat_template_kwargs={"thinking": True})
    assert thinking != text()
    result = pipe.generate(messages=HELLO, max_tokens=8, chat_template_kwargs={"thinking": True})
    assert result.text == thinking
    with pytest.raises(RequestError, match="chat_template_kwargs: only with messages"):
        pipe.generate("x", chat_template_kwargs={"thinking": True})


def test_other_errors(server: Server) -> None:
    assert server.post(CHAT, model="gpt-4", messages=HELLO).error["code"] == "model_not_found"
    assert server.ask("GET", "/nothing").status == 404
    assert server.ask("GET", CHAT).status == 405
    for body in (b"", b"{", b"[]", b"\xff", b"[" * 100_00, b'{"model": "\\ud800"}'):
        reply = server.ask("POST", CHAT, body)
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    body = json.dumps({"model": MODEL, "messages": HELLO}).encode()
    assert server.ask("POST", CHAT, body, Content_Type="text/plain").status == 415
    assert server.ask("GET", "/health").status == 200


def test_a_body_over_the_limit_gets_413(server: Server) -> None:
    fields = {"model": MODEL, "prompt": "x" * MAX_BODY}
    for size in (1, 64):
        reply = server.post(COMPLETIONS, **(fields | {"prompt": "x" * (MAX_BODY * size)}))
        assert (reply.status, reply.error["type"]) == (413, "invalid_request_error")
    connection = server.connection()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    pieces = (b"x" * 1000 for _ in range(MAX_BODY // 1000 + 2))
    connection.request("POST", COMPLETIONS, pieces, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_the_api_key_guards_the_api_and_nothing_else(server: Server) -> None:
    for header in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xff"):
        for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("POST", COMPLETIONS)):
            reply = server.ask(method, path, Authorization=header)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    for path in ("/health", "/version", "/metrics", "/schema/openapi.json"):
        assert server.ask("GET", path, Authorization="").status == 200


async def test_many_clients_at_once_get_their_own_answers(server: Server, pipe: Client) -> None:
    prompts = [f"prompt {i}" for i in range(12)]
    expected = [pipe.generate(p, max_tokens=20).text for p in prompts]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as api:

        async def whole(prompt: str) -> str:
            answer = await api.completions.create(
                model=MODEL, prompt=prompt, max_tokens=20, temperature=0
            )
            return answer.choices[0].text

        async def streamed(prompt: str) -> str:
            chunks = await api.completions.create(
                model=MODEL, prompt=prompt, max_tokens=20, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in chunks])

        answers = await asyncio.gather(*(f(p) for f in (whole, streamed) for p in prompts))
    assert answers == expected * 2


def test_a_full_queue_gets_429_and_gives_everything_back(server: Server, pipe: Client) -> None:
    free = free_blocks(pipe)
    for streamed in (False, True):
        reply = server.post(
            COMPLETIONS, model=MODEL, prompt="x", n=MAX_CHOICES, max_tokens=400, stream=streamed
        )
        if streamed and reply.status == 200:  # the first ones had begun before
            last = reply.body.split(b"\n\n")[-2].removeprefix(b"data: ")
            assert json.loads(last)["error"]["code"] == "rate_limit_exceeded"
        else:
            assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
            assert reply.headers["Retry-After"] == "1"
    wait_for(lambda: free_blocks(pipe) == free)


def test_a_client_that_leaves_cancels_its_requests(server: Server, pipe: Client) -> None:
    free = free_blocks(pipe)
    fields = {"model": MODEL, "prompt": "x", "n": 8, "max_tokens": 500, "ignore_eos": True}
    for streamed in (True, False):
        body = json.dumps(fields | {"stream": streamed}).encode()
        connection = server.send("POST", COMPLETIONS, body)
        if streamed:
            response = connection.getresponse()
            assert response.readline().startswith(b"data: {")
            response.close()
        else:
            wait_for(lambda: pipe.status().counters["frontend_open_requests"] > 0)
        before = pipe.status().counters["finished_requests"]
        connection.close()
        wait_for(lambda: pipe.status().counters["frontend_open_requests"] == 0)
        wait_for(lambda: free_blocks(pipe) == free)
        assert pipe.status().counters["finished_requests"] - before <= 8


def free_blocks(pipe: Client) -> float:
    return pipe.status().counters["free_blocks"]


def test_metrics_count_what_was_served(server: Server, api: openai.OpenAI) -> None:
    before = samples(server)
    usages = [
        api.completions.create(model=MODEL, prompt="count", max_tokens=16, temperature=0, n=2).usage
        for _ in range(2)
    ]
    after = samples(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    tokens = sum(u.completion_tokens for u in usages if u is not None)
    assert tokens == 64
    assert grown("vllm:generation_tokens_total") == tokens
    assert grown("vllm:prompt_tokens_total") == 4 * 5
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert grown(f"vllm:{name}_seconds_count") == 4
    assert grown("vllm:inter_token_latency_seconds_count") == tokens - 4
    assert grown("vllm:spec_decode_num_drafts_total") > 0
    per_position = grown("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert per_position == grown("vllm:spec_decode_num_accepted_tokens_total")
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert 0 <= after["vllm:kv_cache_usage_perc"] <= 1
    assert after["ssd_pipe:up"] == 1
    assert {"ssd_pipe:backups_total", "ssd_pipe:round_seconds_total"} <= set(after)


def samples(server: Server) -> dict[str, float]:
    """Every sample by name, summed over its labels."""
    values: dict[str, float] = {}
    reply = server.ask("GET", "/metrics")
    assert reply.headers["Content-Type"] == CONTENT_TYPE_LATEST
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def test_health_version_and_description(server: Server, pipe: Client) -> None:
    health = server.ask("GET", "/health").json
    assert health["status"] == "ok"
    assert set(health["processes"]) == {"scheduler", "frontend", "target-0", "draft", "gateway"}
    assert health["notes"]["scheduler"]["transport"] == "shm"
    assert server.ask("GET", "/ping").status == 200
    for name in ("target-0", "draft"):
        assert health["notes"][name]["device transport"] in {"cuda-ipc", "nccl", "shm"}
        assert health["notes"][name]["device"]
    assert server.ask("GET", "/version").json["version"]
    described = server.ask("GET", "/schema/openapi.json").json
    body = described["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["$ref"] == "#/components/schemas/ChatRequest"
    schemas = described["components"]["schemas"]
    assert "temperature" in schemas["ChatRequest"]["properties"]
    assert {"ChatCompletion", "Completion", "ErrorBody"} <= set(schemas)
    assert server.ask("GET", "/schema").json == described
    assert server.ask("GET", "/docs").headers["Location"] == "/schema"
    for path in ("/schema/swagger", "/schema/scalar", "/schema/redoc", "/schema/elements"):
        assert server.ask("GET", path).status == 404
    assert {p.name: p.port for p in pipe.status().processes}["gateway"] > 0


NAMES = sorted({*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__, "other"})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-2, 8)
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", "function", "none", "json_object"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
BODIES = st.fixed_dictionaries(
    {"model": st.just(MODEL), "max_tokens": st.integers(1, 4)},
    optional={name: VALUES for name in NAMES if name not in ("model", "max_tokens", "stream")}
    | {
        "prompt": st.text(max_size=9),
        "messages": st.just(HELLO),
        "stream": st.booleans(),
        "timeout": st.sampled_from([None, 60, 0, -1, "x", 1e9]),  # none that may come true
    },
)


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(path=st.sampled_from([COMPLETIONS, CHAT]), body=BODIES, few=st.integers(0, 3))
def test_no_body_is_answered_with_a_server_error(
    server: Server, path: str, body: dict[str, Any], few: int
) -> None:
    mandatory = ("model", "max_tokens", "prompt", "messages")
    kept = [name for name in body if name in mandatory]
    others = [name for name in body if name not in mandatory][:few]
    reply = server.post(path, **{name: body[name] for name in kept + others})
    assert reply.status in (200, 400, 404, 413, 429), reply.body
    if reply.status != 200:
        assert set(reply.error) == {"message", "type", "param", "code"}
    elif reply.headers["Content-Type"].startswith("text/event-stream"):
        assert reply.body.endswith(b"data: [DONE]\n\n")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=st.sampled_from([COMPLETIONS, CHAT]), body=st.binary(max_size=64))
def test_no_bytes_are_answered_with_a_server_error(server: Server, path: str, body: bytes) -> None:
    with contextlib.suppress(ValueError):
        body = json.dumps({"model": MODEL, "prompt": body.decode("latin-1"), "n": 2}).encode()[:-2]
    assert server.ask("POST", path, body).status in (400, 413)
