import msgspec
import pytest
import zmq

from ipc.messages import (
    AbortRequest,
    Ask,
    Cancel,
    ChatMessage,
    Chunk,
    Failure,
    Rejected,
    RequestStats,
    ServerMessage,
    StatusReply,
    Submit,
    TokensOut,
)
from procs.frontend import STATS_WAIT
from ssd_pipe.endpoint import MAX_MESSAGE
from ssd_pipe.params import NoiseKey, SamplingParams
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
    wire.send(Submit(id="a", prompt="x", params=SamplingParams(stop=("END",))))
    added = run.peer.add()
    tokens = [*ids("ab E"), *ids("ND"), *ids("more")]
    run.peer.send(TokensOut(added.rid, ids("ab E"), 0))
    assert wire.recv().text == "ab "
    run.peer.send(TokensOut(added.rid, [*ids("ND"), *ids("more")], 2))
    chunk = wire.recv()
    assert (chunk.text, chunk.finish_reason) == ("", "stop")
    assert chunk.token_ids == tuple(tokens[len(ids("ab E")) : len(ids("ab E")) + len(ids("ND"))])
    assert chunk.metrics.output_tokens == len(ids("ab E")) + len(chunk.token_ids)
    assert run.peer.abort() == AbortRequest(added.rid, "stop")
    # what was under way for it is dropped, and its id is free again
    run.peer.send(TokensOut(added.rid, [7], 0))
    wire.send(Submit(id="a", prompt="y"))
    assert run.peer.add().tokens == ids("y")


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
def test_a_bad_request_is_refused_and_harms_nobody(run, wire, submit, field, words):
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
