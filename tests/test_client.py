import asyncio
import gc
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
import zmq

from ipc.messages.client import ChatMessage, Chunk, ClientMessage, Submit
from ipc.rundir import RunDir
from ssd_pipe import submission
from ssd_pipe.client import AsyncClient, Client, Result
from ssd_pipe.endpoint import MAX_MESSAGE, find_endpoint
from ssd_pipe.errors import PeerLost, RequestError, ResourceError
from ssd_pipe.params import SamplingParams
from tests.frontend_peer import HANG, Echo, pipeline
from tests.text.vocabularies import byte_level
from tests.wire import Stranger

WAIT = 10.0


@pytest.fixture
def run(tmp_path):
    with pipeline(tmp_path) as made:
        made.echo = Echo(made.peer)
        yield made
        made.stop()
        made.echo.close()


@pytest.fixture
def client(run):
    with Client(run.endpoint, timeout=WAIT) as made:
        yield made


def test_generate_returns_the_whole_answer(client):
    result = client.generate("the lazy dog", max_tokens=50)
    assert isinstance(result, Result)
    assert (result.text, result.finish_reason) == ("the lazy dog", "length")
    assert result.token_ids == tuple(byte_level().encode("the lazy dog"))
    assert result.metrics.output_tokens == len(result.token_ids)


def test_every_form_of_prompt_and_of_parameters(run, client):
    ids = byte_level().encode("fox")
    assert client.generate(token_ids=ids).text == "fox"
    for prompt in (ids, np.array(ids), {"prompt": "fox"}, {"prompt_token_ids": ids, "prompt": "x"}):
        assert client.generate(prompt).text == "fox"
    assert client.stream(ids).result().text == "fox"
    assert client.generate(messages=[ChatMessage("user", "hi")]).text == "user: hi\n"
    assert client.generate(messages=[{"role": "user", "content": "hi"}]).text == "user: hi\n"
    assert client.chat("hi").result().text == "user: hi\n"
    params = SamplingParams(temperature=0.5, seed=3)
    assert client.generate("fox", params, stop="ox", seed=4).text == "f"
    while not run.echo.added.empty():
        last = run.echo.added.get()
    assert (last.key.temperature, last.key.seed) == (0.5, 4)


@pytest.mark.parametrize(
    ("prompts", "several"),
    [
        ("a", ["a"]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        (
            [{"prompt": "a"}, {"prompt_token_ids": [1]}],
            [{"prompt": "a"}, {"prompt_token_ids": [1]}],
        ),
        (["a", [1, 2]], ["a", [1, 2]]),
        (("a", "b"), ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([np.int64(1), np.uint8(2)], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([], []),
    ],
)
def test_prompts_of_a_batch(prompts, several):
    assert submission.each_prompt(prompts) == several


@pytest.mark.parametrize("wrong", [None, 3, b"abc", np.array(3)])
def test_what_is_no_prompt_is_refused(wrong):
    with pytest.raises(RequestError, match=r"^prompts: must be a prompt or a list of prompts, got"):
        submission.each_prompt(wrong)


def test_a_stream_gives_chunks_as_they_come(client):
    with client.stream("a 🙂 b") as stream:
        chunks = list(stream)
    assert len(chunks) == len(byte_level().encode("a 🙂 b"))
    assert "".join(c.text for c in chunks) == "a 🙂 b"
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert list(stream) == []


def test_requests_of_one_client_run_side_by_side(run, client):
    hanging = client.stream(token_ids=[HANG])
    streams = [client.stream(f"number {i}") for i in range(8)]
    assert [s.result().text for s in reversed(streams)] == [f"number {i}" for i in range(7, -1, -1)]
    results = {}

    def work(i):
        results[i] = client.generate(f"thread {i}").text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert results == {i: f"thread {i}" for i in range(6)}
    hanging.close()
    assert run.echo.aborted.get(timeout=WAIT).reason == "cancelled"


def test_cancel_ends_the_stream_with_a_chunk(run, client):
    stream = client.stream(token_ids=[HANG])
    rid = run.echo.added.get(timeout=WAIT).rid
    stream.cancel()
    assert [c.finish_reason for c in stream] == ["cancelled"]
    assert run.echo.aborted.get(timeout=WAIT).rid == rid


@pytest.mark.parametrize("first", ["the chunk", "the next reader"])
def test_what_an_interrupted_reader_waited_for_comes_to_the_next(run, client, first):
    """An interrupt can leave a wait where nobody is left to take it back."""
    stream = client.stream(token_ids=[HANG])
    run.echo.added.get(timeout=WAIT)
    waits = [asyncio.run_coroutine_threadsafe(stream._read(0), client._loop) for _ in range(2)]
    waits[0].cancel()
    chunks = []
    reader = threading.Thread(target=lambda: chunks.extend(stream))
    if first == "the next reader":
        reader.start()
    client.cancel(stream.id)
    assert waits[1].result(WAIT).finish_reason == "cancelled"
    if first == "the chunk":
        reader.start()
    reader.join(WAIT)
    assert [chunk.finish_reason for chunk in chunks] == ["cancelled"]


def test_a_stream_can_be_left_though_somebody_reads(run, client):
    stream = client.stream(token_ids=[HANG])
    rid = run.echo.added.get(timeout=WAIT).rid
    asyncio.run_coroutine_threadsafe(stream._read(0), client._loop)
    stream.close()
    assert run.echo.aborted.get(timeout=WAIT).rid == rid


@pytest.mark.parametrize("how", ["close", "with", "drop", "client"])
def test_leaving_a_stream_early_cancels_the_request(run, client, how):
    stream = client.stream(token_ids=[HANG])
    rid = run.echo.added.get(timeout=WAIT).rid
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    elif how == "drop":
        del stream
        gc.collect()
    else:
        client.close()
    assert run.echo.aborted.get(timeout=WAIT).rid == rid


def test_a_refused_request_raises_what_the_frontend_said(client):
    with pytest.raises(RequestError, match=r"^prompt: must not be empty") as caught:
        client.generate("")
    assert (caught.value.code, caught.value.field) == (400, "prompt")
    with pytest.raises(TypeError, match="tempreature"):
        client.generate("x", tempreature=1)
    with pytest.raises(RequestError) as caught:
        client.generate("x" * MAX_MESSAGE)
    assert caught.value.code == 413
    assert client.generate("fine").text == "fine"


KWARGS = {"chat_template_kwargs": {"a": "\udc80"}}


def test_text_that_is_not_unicode_is_refused(client):
    for arguments, field in (
        ({"prompt": "a\udc80"}, "prompt"),
        ({"messages": [ChatMessage("user", "a\udc80")]}, "messages"),
        ({"prompt": "a", "stop": "\udc80"}, "stop"),
        ({"messages": [ChatMessage("user", "a")], **KWARGS}, "chat_template_kwargs"),
    ):
        with pytest.raises(RequestError, match="not valid Unicode") as caught:
            client.generate(**arguments)
        assert (caught.value.code, caught.value.field) == (400, field)
    assert client.generate("fine").text == "fine"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [ChatMessage("user", None)]}, "messages"),
        ({"messages": 3}, "messages"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": b"x"}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": {"prompt": 3}}, "prompt"),
        ({"prompt": {"prompt": "x", "multi_modal_data": {}}}, "prompt"),
        ({"prompt": [1], "token_ids": [1]}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [1.5]}, "token_ids"),
    ],
)
def test_a_part_of_the_wrong_type_is_named(client, arguments, field):
    with pytest.raises(RequestError) as caught:
        client.stream(**arguments)
    assert caught.value.code == 400
    assert caught.value.field == field
    assert client.generate("x").text == "x"


WRONG = [
    ("max_tokens", "5"),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("min_tokens", 200),
    ("temperature", "hot"),
    ("temperature", -0.5),
    ("temperature", float("nan")),
    ("top_p", 0.0),
    ("top_k", 2**40),
    ("seed", 1.5),
    ("seed", -1),
    ("stop", ["a", 3]),
    ("stop", [""]),
    ("stop_token_ids", [2**40]),
    ("logit_bias", {5: "much"}),
    ("logit_bias", {5: 101.0}),
    ("logprobs", 21),
    ("response_format", "json"),
    ("n", 0),
    ("timeout", 0),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_wrong_sampling_is_refused_at_once_as_the_pipeline_does(run, field, value):
    message = {"type": "submit", "id": "a", "prompt": "x", "params": {field: value}}
    with Stranger(run.endpoint) as stranger:
        stranger.send(msgspec.msgpack.encode(message))
        told = stranger.recv()
    # of a pipeline that is not there
    with Client("ipc:///nowhere") as client:
        for given in ({field: value}, {"params": SamplingParams(**{field: value})}):
            with pytest.raises(RequestError) as caught:
                client.stream("x", **given)
            assert (caught.value.code, str(caught.value)) == (told.code, told.message)
            assert caught.value.field == told.field
            assert told.field.partition(".")[0] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 2**70),
        ("max_tokens", 2**70),
        ("temperature", 10**400),
        ("stop_token_ids", [2**70]),
        ("logit_bias", {2**70: 1}),
        ("response_format", {"type": 2**70}),
        ("response_format", {"type": object()}),
        ("token_ids", [2**70]),
    ],
)
def test_what_no_message_holds_is_refused_by_name(field, value):
    with Client("ipc:///nowhere") as client, pytest.raises(RequestError) as caught:
        client.stream(**{"prompt": None if field == "token_ids" else "x", field: value})
    assert (caught.value.code, caught.value.field) == (400, field)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


FINE = {
    "messages": [ChatMessage("user", "hi")],
    "response_format": {"type": "json_object"},
    "chat_template_kwargs": {"enable_thinking": False},
}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"response_format": {"type": object()}}, "cannot be sent: Encoding objects of type"),
        ({"response_format": {"type": "\udc80"}}, "not valid Unicode"),
        ({"response_format": {"a": nested(100_000)}}, "cannot be sent: maximum recursion depth"),
        ({"chat_template_kwargs": {"a": 2**70}}, "cannot be sent: can't serialize ints"),
        ({"stop": "\udc80"}, "not valid Unicode"),
        ({"messages": [ChatMessage("user", "\udc80")]}, "not valid Unicode"),
    ],
)
def test_what_cannot_be_sent_is_named_beside_what_can(wrong, words):
    [field] = wrong
    with Client("ipc:///nowhere") as client, pytest.raises(RequestError) as caught:
        client.stream(**(FINE | wrong))
    assert (caught.value.code, caught.value.field) == (400, field)
    assert str(caught.value).startswith(f"{field}: {words}")


def test_numbers_may_be_numpys(run, client):
    client.generate("x", seed=np.int64(3), temperature=np.float32(0.5), max_tokens=np.uint8(9))
    key = run.echo.added.get(timeout=WAIT).key
    assert (key.seed, key.temperature) == (3, 0.5)


def test_numbers_may_be_numpys_wherever_they_are(client):
    schema = {"maxLength": np.int64(3), "enum": np.array([1, 2]), "minimum": [{"a": np.float32(1)}]}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    plain = {"maxLength": 3, "enum": [1, 2], "minimum": [{"a": 1.0}]}
    same = {"type": "json_schema", "json_schema": {"schema": plain}}
    kwargs = {"thinking": np.bool_(True), "of": {"a": [np.int64(2)]}}
    params = submission.sampling(None, {"response_format": wanted})
    sent = submission.encode(Submit(id="a", params=params, chat_template_kwargs=kwargs))
    told = msgspec.msgpack.decode(sent, type=ClientMessage)
    assert told.params.response_format == same
    assert told.chat_template_kwargs == {"thinking": True, "of": {"a": [2]}}
    assert client.chat("x", chat_template_kwargs=kwargs).result().text == "user: x\n+"


def test_status(client):
    assert client.status().running == 1


def test_a_stopping_pipeline_fails_open_requests(run, client):
    stream = client.stream(token_ids=[HANG])
    run.echo.added.get(timeout=WAIT)
    run.stop()
    with pytest.raises(RequestError, match=r"^pipeline stopped: test$") as caught:
        next(stream)
    assert caught.value.code == 503
    with pytest.raises(PeerLost, match="no pipeline answers"):
        client.generate("x")


def test_a_pause_of_its_own_is_no_silence_of_the_pipeline(run):
    async def work():
        async with AsyncClient(run.endpoint, timeout=0.6) as client:
            stream = client.stream(token_ids=[HANG])
            await client.status()
            time.sleep(1.5)  # nothing of this process goes on
            await client.status()
            await stream.cancel()
            return [chunk.finish_reason async for chunk in stream]

    assert asyncio.run(work()) == ["cancelled"]


def test_a_pipeline_that_vanishes_is_noticed_at_once():
    router = zmq.Context.instance().socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with Client(f"tcp://127.0.0.1:{port}", timeout=600) as client:
        stream = client.stream("x")
        assert router.poll(10_000)
        router.close(0)
        with pytest.raises(PeerLost, match="has gone"):
            next(stream)


def test_a_silent_pipeline_is_given_up():
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with Client(f"tcp://127.0.0.1:{port}", timeout=0.4) as client:
            begun = time.monotonic()
            with pytest.raises(PeerLost, match="has not answered"):
                client.generate("x")
            with pytest.raises(PeerLost, match="has not answered"):
                client.status()
            assert 0.8 <= time.monotonic() - begun < WAIT
        seen = [router.recv_multipart()[1] for _ in range(3)]
        assert any(msgspec.msgpack.decode(m)["type"] == "ask" for m in seen)


def test_nothing_is_asked_while_an_answer_flows():
    """Many times over the period after which a quiet pipeline is asked."""
    context = zmq.Context.instance()
    with context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with Client(f"tcp://127.0.0.1:{port}", timeout=1.2) as client:
            stream = client.stream("x")
            peer, submit = router.recv_multipart()
            rid = msgspec.msgpack.decode(submit)["id"]
            encoder = msgspec.msgpack.Encoder()
            end = time.monotonic() + 2.4
            while time.monotonic() < end:
                router.send_multipart([peer, encoder.encode(Chunk(id=rid, text="a"))])
                next(stream)
                assert not router.poll(20), router.recv_multipart()[1]
            router.send_multipart([peer, encoder.encode(Chunk(id=rid, finish_reason="stop"))])
            assert next(stream).finish_reason == "stop"


def test_slow_answers_are_waited_for_while_questions_are_answered(run):
    with Client(run.endpoint, timeout=0.6) as client:
        stream = client.stream(token_ids=[HANG])
        rid = run.echo.added.get(timeout=WAIT).rid
        released = threading.Timer(1.8, stream.cancel)
        released.start()
        assert next(stream).finish_reason == "cancelled"
        assert run.echo.aborted.get(timeout=WAIT).rid == rid


def test_the_only_run_is_found(run, monkeypatch):
    monkeypatch.delenv("SSD_ENDPOINT", raising=False)
    with Client(shm_dir=run.shm_dir) as client:
        assert client.generate("x").text == "x"
    assert find_endpoint(run="t", shm_dir=run.shm_dir) == run.endpoint
    monkeypatch.setenv("SSD_ENDPOINT", "tcp://other:1")
    assert find_endpoint() == "tcp://other:1"
    assert find_endpoint(shm_dir=run.shm_dir) == run.endpoint
    assert find_endpoint("tcp://given:1", "t", run.shm_dir) == "tcp://given:1"
    assert find_endpoint(run="t", shm_dir=run.shm_dir) == run.endpoint
    with pytest.raises(ResourceError, match=r"'gone'.*ssd-pipe up"):
        Client(run="gone", shm_dir=run.shm_dir)


def test_no_run_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.delenv("SSD_ENDPOINT", raising=False)
    with pytest.raises(ResourceError, match=r"no pipeline to talk to: .*ssd-pipe up.* run="):
        Client(shm_dir=str(tmp_path))
    with (
        RunDir.create(tmp_path, "one"),
        RunDir.create(tmp_path, "two"),
        pytest.raises(ResourceError, match=r"one, two.* run=, .*endpoint=$"),
    ):
        Client(shm_dir=str(tmp_path))
    with pytest.raises(ResourceError, match="nonsense"), Client("nonsense") as client:
        client.status()


def test_a_closed_client_says_so(run):
    client = Client(run.endpoint)
    assert client.generate("x").text == "x"
    client.close()
    client.close()
    with pytest.raises(PeerLost, match="closed"):
        client.generate("x")


async def test_async_requests_run_side_by_side(run):
    async with AsyncClient(run.endpoint, timeout=WAIT) as client:
        results = await asyncio.gather(*(client.generate(f"number {i}") for i in range(8)))
        assert [r.text for r in results] == [f"number {i}" for i in range(8)]
        texts = [chunk.text async for chunk in client.stream("a b")]
        assert "".join(texts) == "a b"
        assert (await client.status()).run == "t"


async def test_cancelling_the_task_cancels_the_request(run):
    async with AsyncClient(run.endpoint, timeout=WAIT) as client:
        task = asyncio.create_task(client.generate(token_ids=[HANG]))
        added = await asyncio.to_thread(run.echo.added.get, timeout=WAIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        aborted = await asyncio.to_thread(run.echo.aborted.get, timeout=WAIT)
        assert aborted.rid == added.rid


def test_the_client_imports_no_torch():
    code = "import sys, ssd_pipe; ssd_pipe.Client; ssd_pipe.LLM; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
