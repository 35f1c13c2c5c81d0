import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from ipc.messages.client import (
    Ask,
    Cancel,
    ChatMessage,
    Chunk,
    Failure,
    ServerMessage,
    StatusReply,
    Submit,
)
from ipc.messages.requests import AbortRequest, Rejected, RequestStats, TokensOut
from ipc.messages.sampling import NoiseKey, Processors
from ipc.messages.target import Logprobs
from procs.frontend import FAREWELL, Frontend
from procs.latest_stats import STATS_WAIT
from ssd_pipe.endpoint import MAX_MESSAGE
from ssd_pipe.params import SamplingParams, derived_seed
from tests.frontend_peer import MAX_LEN, TIMEOUT_MS, Pipeline, pipeline
from tests.text.vocabularies import byte_level

EOS = 2


class Wire:
    """A client that speaks the protocol and nothing more."""

    def __init__(self, endpoint):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(ServerMessage)

    def send(self, message):
        data = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        self.socket.send(data)

    def recv(self):
        if not self.socket.poll(TIMEOUT_MS):
            raise TimeoutError("the frontend answered nothing")
        return self._decoder.decode(self.socket.recv())

    def close(self):
        self.socket.close(0)


@pytest.fixture
def run(tmp_path):
    with pipeline(tmp_path) as made:
        yield made


@pytest.fixture
def wire(run):
    made = Wire(run.endpoint)
    yield made
    made.close()


def ids(text):
    return byte_level().encode(text)


def test_a_request_from_submit_to_the_last_chunk(run, wire):
    wire.send(Submit(id="a", prompt="the fox", params=SamplingParams(max_tokens=9)))
    added = run.peer.add()
    assert added.tokens == ids("the fox")
    assert (added.max_tokens, added.key, added.stop_ids) == (9, NoiseKey(), [2, 0])
    answer = ids("lazy 🙂 dog")
    half = len(answer) // 2
    run.peer.send(TokensOut(added.rid, answer[:half], 0))
    first = wire.recv()
    stats = RequestStats(
        scheduled_ns=added.arrived_ns + 10**6,
        first_token_ns=10**9,
        last_token_ns=2 * 10**9,
        rounds=4,
        drafted=20,
        accepted=6,
        hits=3,
        misses=1,
        cached_prompt_tokens=5,
    )
    run.peer.send(TokensOut(added.rid, [*answer[half:], EOS], 1, "stop", stats))
    last = wire.recv()
    assert first.text + last.text == "lazy 🙂 dog"
    assert first.token_ids + last.token_ids == (*answer, EOS)
    assert (first.finish_reason, last.finish_reason) == (None, "stop")
    assert first.metrics is None
    m = last.metrics
    assert (m.prompt_tokens, m.output_tokens) == (len(added.tokens), len(answer) + 1)
    assert m.queue_time == pytest.approx(1e-3)
    assert m.decode_rate == pytest.approx(len(answer))
    assert (m.hit_rate, m.cached_prompt_tokens) == (0.75, 5)
    assert m.accepted_mean is None  # there is no draft in this mode
    assert 0 < m.time_to_first_token <= m.total_time


def test_the_text_of_an_ending_token_is_not_shown(run, wire):
    stop = ids("x")[0]
    params = SamplingParams(stop_token_ids=(stop,), ignore_eos=True)
    wire.send(Submit(id="a", token_ids=(5, 6), params=params))
    added = run.peer.add()
    assert (added.tokens, added.stop_ids) == ([5, 6], [stop])
    run.peer.send(TokensOut(added.rid, [*ids("dog"), stop], 0, "stop"))
    chunk = wire.recv()
    assert (chunk.text, chunk.token_ids) == ("dog", (*ids("dog"), stop))


def test_chat_goes_through_the_template(run, wire):
    wire.send(Submit(id="a", messages=(ChatMessage("user", "hi"),)))
    bos = byte_level().backend.token_to_id("<s>")
    assert run.peer.add().tokens == [bos, *ids("user: hi\n")]


def test_a_stop_text_ends_the_request_on_both_sides(run, wire):
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(stop=("END",), logprobs=0)))
    added = run.peer.add()
    head, tail, more = ids("ab E"), ids("ND"), ids("more")
    run.peer.send(TokensOut(added.rid, head, 0, logprobs=figures(head)))
    assert wire.recv().text == "ab "
    late = [*tail, *more]
    run.peer.send(TokensOut(added.rid, late, 2, logprobs=figures(late)))
    chunk = wire.recv()
    assert (chunk.text, chunk.finish_reason, chunk.token_ids) == ("", None, tuple(tail))
    assert [entry.token_id for entry in chunk.logprobs] == tail
    assert run.peer.abort() == AbortRequest(added.rid, "stop")
    # what was under way for it is dropped, its figures are not
    run.peer.send(TokensOut(added.rid, [7], 0))
    stats = RequestStats(rounds=3, drafted=9, accepted=2, hits=2, misses=1)
    run.peer.send(TokensOut(added.rid, [], 0, "stop", stats))
    last = wire.recv()
    assert (last.text, last.finish_reason, last.token_ids) == ("", "stop", ())
    assert last.metrics.output_tokens == len(head) + len(tail)
    assert (last.metrics.rounds, last.metrics.hit_rate) == (3, pytest.approx(2 / 3))
    wire.send(Submit(id="a", prompt="y"))  # its id is free again
    assert run.peer.add().tokens == ids("y")


def test_a_stop_text_in_the_schedulers_last_message(run, wire):
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(stop=("END",))))
    added = run.peer.add()
    run.peer.send(TokensOut(added.rid, ids("ab END more"), 0, "length", RequestStats(rounds=2)))
    chunk = wire.recv()
    assert (chunk.text, chunk.finish_reason, chunk.metrics.rounds) == ("ab ", "stop", 2)
    assert chunk.metrics.output_tokens == len(chunk.token_ids) < len(ids("ab END more"))


def test_the_scheduler_finishes_while_a_stop_text_is_found(run, wire):
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(stop=("END",))))
    added = run.peer.add()
    run.peer.send(TokensOut(added.rid, ids("END"), 0))
    run.peer.send(TokensOut(added.rid, ids("more"), 0, "length", RequestStats(rounds=5)))
    assert wire.recv().finish_reason is None
    last = wire.recv()
    assert (last.finish_reason, last.token_ids, last.metrics.rounds) == ("stop", (), 5)


def test_stop_texts_and_ids_can_be_kept(run, wire):
    stop_id = ids("x")[0]
    params = SamplingParams(
        stop=("END",), stop_token_ids=(stop_id,), include_stop_str_in_output=True
    )
    wire.send(Submit(id="a", prompt="x", params=params))
    wire.send(Submit(id="b", prompt="x", params=params))
    first, second = run.peer.add(), run.peer.add()
    run.peer.send(TokensOut(first.rid, ids("ab END more"), 0))
    assert wire.recv().text == "ab END"
    run.peer.abort()
    run.peer.send(TokensOut(second.rid, [*ids("dog"), stop_id], 0, "stop"))
    assert wire.recv().text == "dogx"


def test_special_tokens_are_shown_where_they_are_wanted(run, wire):
    for skipped, expected in ((True, "ab"), (False, "a<s>b")):
        params = SamplingParams(skip_special_tokens=skipped, stop=("</s>",))
        wire.send(Submit(id="a", prompt="x", params=params))
        added = run.peer.add()
        run.peer.send(TokensOut(added.rid, [*ids("a"), 1, *ids("b")], 0))
        text = wire.recv().text
        # A stop text may be a special token's.
        run.peer.send(TokensOut(added.rid, [2, *ids("c")], 0, "length"))
        assert text + wire.recv().text == expected + "c" * skipped


def test_no_stop_text_before_min_tokens(run, wire):
    params = SamplingParams(stop=("ab",), min_tokens=3)
    wire.send(Submit(id="a", prompt="x", params=params))
    added = run.peer.add()
    assert (added.key.processors.min_tokens, added.key.processors.stop_ids) == (3, (2, 0))
    a, b = ids("a"), ids("b")
    run.peer.send(TokensOut(added.rid, [*a, *b, *a, *b, *a], 0))
    chunk = wire.recv()
    assert (chunk.text, chunk.token_ids) == ("ab", (*a, *b, *a, *b))


def test_a_chunk_tells_which_of_its_text_the_draft_gave(run, wire):
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(stop=("END",))))
    added = run.peer.add()
    ab, snowman, dog = ids("ab"), ids("☃"), ids("dog")
    assert len(snowman) > 1
    for tokens, accepted, drafted, expected in (
        ([*ab, *snowman], len(ab) + 1, 5, ("ab☃", 2)),  # half a character is not shown yet
        ([*dog, *ids("E")], len(dog), len(dog), ("dog", 3)),  # nor what may be a stop text
        (ids("x"), 0, 4, ("Ex", 0)),
        (ids("END"), len(ids("END")), 5, ("", 0)),
    ):
        run.peer.send(TokensOut(added.rid, tokens, accepted, drafted=drafted))
        chunk = wire.recv()
        assert (chunk.text, chunk.accepted_text) == expected
        assert (chunk.accepted, chunk.drafted) == (accepted, drafted)


def figures(tokens):
    return [Logprobs(-float(t), 2, [t, 7], [-0.5, -1.5]) for t in tokens]


def test_logprobs_come_with_the_tokens_and_their_bytes(run, wire):
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(logprobs=2)))
    added = run.peer.add()
    assert added.logprobs == 2
    tokens = [*ids("né 🙂"), EOS]
    run.peer.send(TokensOut(added.rid, tokens, 0, "stop", logprobs=figures(tokens)))
    chunk = wire.recv()
    assert [entry.token_id for entry in chunk.logprobs] == list(chunk.token_ids) == tokens
    assert [entry.logprob for entry in chunk.logprobs] == [-float(t) for t in tokens]
    assert b"".join(entry.data for entry in chunk.logprobs).decode() == "né 🙂</s>"
    assert [other.token_id for other in chunk.logprobs[0].top] == [tokens[0], 7]
    wire.send(Submit(id="b", prompt="x"))
    assert run.peer.add().logprobs == -1


def test_settings_for_the_logits_travel_only_where_there_are_any(run, wire):
    params = SamplingParams(
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={7: 3.0, 9: -100.0},
    )
    wire.send(Submit(id="a", prompt="the fox", params=params))
    added = run.peer.add()
    assert added.key == NoiseKey(
        processors=Processors(
            prompt_len=len(added.tokens),
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias=((7, 3.0), (9, -100.0)),
            stop_ids=(2, 0),
        )
    )
    wire.send(Submit(id="b", prompt="x", params=SamplingParams(logit_bias={})))
    assert run.peer.add().key.processors is None


def test_several_answers_have_seeds_of_their_own_and_end_one_by_one(run, wire):
    params = SamplingParams(temperature=1.0, seed=5, n=3)
    wire.send(Submit(id="a", prompt="x", params=params))
    added = [run.peer.add() for _ in range(3)]
    assert [a.key.seed for a in added] == [derived_seed(5, i) for i in range(3)]
    assert len({a.key.seed for a in added}) == 3
    for index in (2, 0):
        run.peer.send(TokensOut(added[index].rid, ids("yes"), 0, "length"))
        chunk = wire.recv()
        assert (chunk.id, chunk.index, chunk.finish_reason) == ("a", index, "length")
    wire.send(Cancel("a"))
    last = wire.recv()
    assert (last.index, last.finish_reason) == (1, "cancelled")
    assert run.peer.abort() == AbortRequest(added[1].rid)
    wire.send(Submit(id="a", prompt="y"))
    assert run.peer.add().tokens == ids("y")


def test_one_refused_answer_ends_them_all(run, wire):
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(n=2)))
    first, second = run.peer.add(), run.peer.add()
    run.peer.send(Rejected(second.rid, 429, "queue is full"))
    assert wire.recv() == Failure(id="a", code=429, message="queue is full")
    assert run.peer.abort() == AbortRequest(first.rid)


def test_text_held_back_for_a_stop_comes_with_the_last_chunk(run, wire):
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(stop=("END",))))
    added = run.peer.add()
    run.peer.send(TokensOut(added.rid, ids("the EN"), 0, "length"))
    chunk = wire.recv()
    assert (chunk.text, chunk.finish_reason) == ("the EN", "length")


def test_max_tokens_is_clipped_to_the_room_left(run, wire):
    wire.send(Submit(id="a", token_ids=(5,) * 60, params=SamplingParams(max_tokens=100)))
    assert run.peer.add().max_tokens == MAX_LEN - 60


def test_sampling_settings_travel_and_seeds_are_drawn(run, wire):
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11)
    wire.send(Submit(id="a", prompt="x", params=params))
    assert run.peer.add().key == NoiseKey(11, 0.5, 0.9, 7, 0.1)
    seeds = set()
    for name in "bc":
        wire.send(Submit(id=name, prompt="x", params=SamplingParams(temperature=1.0)))
        seeds.add(run.peer.add().key.seed)
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("submit", "field", "words"),
    [
        (Submit(id="a"), "prompt", "exactly one"),
        (Submit(id="a", prompt="x", token_ids=(1,)), "token_ids", "prompt and token_ids"),
        (Submit(id="a", prompt=""), "prompt", "empty"),
        (Submit(id="a", token_ids=()), "token_ids", "empty"),
        (Submit(id="a", messages=()), "messages", "empty"),
        (Submit(id="a", token_ids=(1, 10**6)), "token_ids", "1000000"),
        (Submit(id="a", token_ids=(-1,)), "token_ids", "-1"),
        (Submit(id="a", token_ids=(1,) * MAX_LEN), "token_ids", f"{MAX_LEN} tokens"),
        (Submit(id="a", prompt="xyz " * 4000), "prompt", f"max_model_len = {MAX_LEN}"),
        (Submit(id="a", prompt="x", params=SamplingParams(top_p=0.0)), "top_p", "(0, 1]"),
        (Submit(id="", prompt="x"), "id", "1 to 128"),
    ],
)  # fmt: skip
def test_a_bad_one_harms_nobody(run, wire, submit, field, words):
    wire.send(Submit(id="good", prompt="x"))
    added = run.peer.add()
    wire.send(submit)
    failure = wire.recv()
    assert isinstance(failure, Failure)
    assert (failure.id, failure.code, failure.field) == (submit.id, 400, field)
    assert words in failure.message
    run.peer.send(TokensOut(added.rid, ids("y"), 0, "length"))
    assert wire.recv().text == "y"


@pytest.mark.parametrize(
    ("data", "failed_id", "code"),
    [
        (b"", "", 400),
        (b"\xc1nonsense", "", 400),
        (msgspec.msgpack.encode({"type": "dance", "id": "q"}), "q", 400),
        (msgspec.msgpack.encode({"type": "submit", "id": "q", "prompt": 3}), "q", 400),
        (msgspec.msgpack.encode({"type": "submit", "id": 7, "prompt": "x"}), "", 400),
        (msgspec.msgpack.encode({"type": "submit", "id": "q", "params": {"tpo_p": 1}}), "q", 400),
        (b"\x91" * 100_000, "", 400),
        (b"x" * (MAX_MESSAGE + 1), "", 413),
    ],
)
def test_a_message_that_is_none_is_answered_and_counted(run, wire, data, failed_id, code):
    wire.send(data)
    failure = wire.recv()
    assert isinstance(failure, Failure)
    assert (failure.id, failure.code) == (failed_id, code)
    wire.send(Submit(id="a", prompt="x"))
    run.peer.add()
    wire.send(Ask("s"))
    run.peer.answer_question()
    assert wire.recv().counters["frontend_bad_messages"] == 1


def test_several_frames_are_no_message(run, wire):
    wire.socket.send_multipart([b"", msgspec.msgpack.encode(Ask("s"))])
    assert "one frame" in wire.recv().message


def test_cancel_ends_a_request_here_and_at_the_scheduler(run, wire):
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(stop=("END",))))
    added = run.peer.add()
    run.peer.send(TokensOut(added.rid, ids("aEN"), 0))
    assert wire.recv().text == "a"
    wire.send(Cancel("a"))
    chunk = wire.recv()
    assert (chunk.finish_reason, chunk.text) == ("cancelled", "EN")
    assert run.peer.abort() == AbortRequest(added.rid, "cancelled")
    wire.send(Cancel("a"))
    wire.send(Cancel("never"))
    wire.send(Ask("s", "weather"))
    assert wire.recv().field == "what"


def test_a_request_out_of_time_fails_and_is_dropped(run, wire):
    wire.send(Submit(id="late", prompt="x", params=SamplingParams(timeout=0.2, n=2)))
    late = {run.peer.add().rid for _ in range(2)}
    wire.send(Submit(id="other", prompt="x"))
    other = run.peer.add()
    failure = wire.recv()
    assert (failure.id, failure.code) == ("late", 504)
    assert failure.message == "the request has run out of time (0.2 s)"
    assert {run.peer.abort().rid for _ in late} == late
    run.peer.send(TokensOut(other.rid, ids("y"), 0, "length"))
    assert wire.recv().text == "y"
    wire.send(Ask("s"))
    run.peer.answer_question()
    counters = wire.recv().counters
    assert (counters["frontend_timed_out"], counters["frontend_open_requests"]) == (1, 0)


def test_a_deadline_goes_with_its_request(run, wire):
    """A later request of the same name outlives it."""
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(timeout=0.3)))
    run.peer.send(TokensOut(run.peer.add().rid, ids("1"), 0, "length"))
    assert wire.recv().text == "1"
    wire.send(Submit(id="a", prompt="x"))
    second = run.peer.add()
    wire.send(Submit(id="b", prompt="x", params=SamplingParams(timeout=0.4)))
    run.peer.add()
    assert wire.recv().id == "b"  # so the first deadline has passed
    run.peer.abort()
    run.peer.send(TokensOut(second.rid, ids("2"), 0, "length"))
    assert wire.recv().text == "2"


def test_time_is_up_while_a_long_text_is_tokenized(run, wire):
    long = "fox " * 1500
    wire.send(Submit(id="a", prompt=long, params=SamplingParams(timeout=1e-6)))
    answer = wire.recv()
    assert (answer.id, answer.code) in (("a", 504), ("a", 400))  # or refused as too long


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf"), 86401.0])
def test_a_timeout_out_of_range_is_refused(run, wire, timeout):
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(timeout=timeout)))
    failure = wire.recv()
    assert (failure.code, failure.field) == (400, "timeout")


def test_cancel_while_a_long_text_is_tokenized(run, wire):
    wire.send(Submit(id="a", prompt="the lazy dog " * 20_000))
    wire.send(Cancel("a"))
    answer = wire.recv()
    # cancelled in time, or refused as too long by then
    assert (answer.id, isinstance(answer, Chunk) or answer.code == 400) == ("a", True)
    wire.send(Submit(id="a", prompt="x"))
    assert run.peer.add().tokens == ids("x")


def test_an_id_in_use_is_refused_but_not_for_other_clients(run, wire):
    wire.send(Submit(id="a", prompt="x"))
    run.peer.add()
    wire.send(Submit(id="a", prompt="y"))
    failure = wire.recv()
    assert (failure.code, failure.field) == (400, "id")
    other = Wire(run.endpoint)
    other.send(Submit(id="a", prompt="z"))
    added = run.peer.add()
    assert added.tokens == ids("z")
    run.peer.send(TokensOut(added.rid, ids("q"), 0, "length"))
    assert other.recv().text == "q"
    other.close()


@pytest.mark.parametrize("tcp", [False, True])
def test_a_client_that_goes_away_loses_its_requests_only(tmp_path, tcp):
    endpoint = f"tcp://127.0.0.1:{_free_port()}" if tcp else ""
    with pipeline(tmp_path, endpoint) as run:
        stays, goes = Wire(run.endpoint), Wire(run.endpoint)
        stays.send(Submit(id="a", prompt="x"))
        kept = run.peer.add()
        goes.send(Submit(id="a", prompt="y"))
        goes.send(Submit(id="b", prompt="z"))
        lost = {run.peer.add().rid, run.peer.add().rid}
        goes.close()
        assert {run.peer.abort().rid, run.peer.abort().rid} == lost
        run.peer.send(TokensOut(kept.rid, ids("q"), 0, "length"))
        assert stays.recv().text == "q"
        stays.close()


def _free_port():
    socket = zmq.Context.instance().socket(zmq.REP)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    socket.close(0)
    return port


def test_the_schedulers_refusal_reaches_the_client(run, wire):
    wire.send(Submit(id="a", prompt="x"))
    run.peer.send(Rejected(run.peer.add().rid, 429, "queue is full"))
    assert wire.recv() == Failure(id="a", code=429, message="queue is full")


def test_status_tells_what_the_scheduler_says(run, wire):
    wire.send(Ask("s"))
    run.peer.answer_question()
    reply = wire.recv()
    assert isinstance(reply, StatusReply)
    assert (reply.id, reply.run, reply.mode, reply.draft) == ("s", "t", "ar", "")
    assert (reply.max_model_len, reply.running, reply.waiting) == (MAX_LEN, 3, 2)
    assert [p.name for p in reply.processes] == ["scheduler"]


def test_status_does_not_wait_for_a_silent_scheduler(run, wire):
    wire.send(Ask("s"))
    reply = wire.recv()
    assert (reply.running, reply.processes) == (0, ())
    assert STATS_WAIT * 1000 < TIMEOUT_MS


def test_stopping_fails_every_open_request(run, wire):
    for name in "ab":
        wire.send(Submit(id=name, prompt="x"))
        run.peer.add()
    run.stop()
    failures = [wire.recv(), wire.recv()]
    assert {(f.id, f.code) for f in failures} == {("a", 503), ("b", 503)}


def test_clients_get_time_to_read_a_refusal_that_came_just_before_the_end(run, wire):
    wire.send(Submit(id="a", prompt="x"))
    added = run.peer.add()
    begun = time.monotonic()
    run.peer.send(Rejected(added.rid, 503, "pipeline stopped: target-0: gone"))
    assert wire.recv().code == 503
    run.stop()
    assert time.monotonic() - begun > 0.98 * FAREWELL


def test_nonsense_from_the_scheduler_ends_the_frontend_with_a_reason(tmp_path):
    run = Pipeline(tmp_path)
    wire = Wire(run.endpoint)
    wire.send(Submit(id="a", prompt="x"))
    run.peer.add()
    run.peer.tokens.send(b"\xc1")
    assert wire.recv().code == 503
    wire.close()
    run.close()
    assert "unreadable message from the scheduler" in str(run.error)


def test_a_bad_schema_is_refused_with_the_librarys_reason(run, wire):
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(response_format=schema)))
    failure = wire.recv()
    assert (failure.code, failure.field) == (400, "response_format.json_schema")
    assert "objekt" in failure.message


def test_a_grammar_travels_to_the_scheduler(run, wire):
    wanted = {"type": "regex", "regex": "[0-9]{3}"}
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(response_format=wanted)))
    assert "[0-9]{3}" in run.peer.add().key.processors.grammar


async def test_many_messages_at_once_keep_nothing_else_out():
    """The event loop has a turn after each, though none has to be waited for."""
    messages, turns = 50, 0
    empty = asyncio.Event()

    class Port:
        left = messages

        async def recv(self):
            if not self.left:
                empty.set()
                await asyncio.Event().wait()
            self.left -= 1
            return b"client", Cancel("a")

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    frontend = SimpleNamespace(_port=Port(), _cancel=lambda client, message: None)
    tasks = [asyncio.create_task(work) for work in (other(), Frontend._read_clients(frontend))]
    await empty.wait()
    for task in tasks:
        task.cancel()
    assert turns >= messages
