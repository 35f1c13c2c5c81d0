"""The public protocol by hand: valid messages, and every way of getting them wrong."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import zmq
from hypothesis import strategies as st

from ipc.messages.client import (
    Ask,
    Cancel,
    ChatMessage,
    Chunk,
    ClientMessage,
    Failure,
    ServerMessage,
    StatusReply,
    Submit,
)
from ssd_pipe.params import SamplingParams

WAIT = 20.0  # seconds
encode = msgspec.msgpack.encode
DECODER: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)


class Stranger:
    """A connection that sends any frames and reads what comes back."""

    def __init__(self, endpoint: str, kind: int = zmq.DEALER, identity: bytes = b"") -> None:
        self.socket = zmq.Context.instance().socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        if identity:
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.connect(endpoint)
        self._decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(
            ServerMessage
        )
        self._questions = 0

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def recv(self) -> ServerMessage:
        if not self.socket.poll(round(WAIT * 1000)):
            raise TimeoutError("no answer")
        return self._decoder.decode(self.socket.recv())

    def status(self) -> tuple[StatusReply, list[ServerMessage]]:
        """The state now, and whatever else came before that answer."""
        self._questions += 1
        question = f"status {self._questions}"
        self.send(encode(Ask(question)))
        others: list[ServerMessage] = []
        while True:
            message = self.recv()
            if isinstance(message, StatusReply) and message.id == question:
                return message, others
            others.append(message)

    def close(self) -> None:
        self.socket.close(0)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def is_message(frames: list[bytes]) -> bool:
    """Whether the frames are one of the messages a client may send."""
    if len(frames) != 1:
        return False
    try:
        DECODER.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def ends(message: ServerMessage) -> bool:
    """Whether a message is the last one about something."""
    return isinstance(message, Failure) or (
        isinstance(message, Chunk) and message.finish_reason is not None
    )


VALID = [
    Submit(id="a", prompt="x = 1", params=SamplingParams(max_tokens=3)),
    Submit(id="b", messages=(ChatMessage("user", "hé 🙂"),), params=SamplingParams(n=2)),
    Submit(
        id="c",
        token_ids=(5, 6, 7),
        params=SamplingParams(
            max_tokens=4,
            temperature=0.8,
            top_p=0.9,
            top_k=5,
            min_p=0.01,
            seed=2**63 - 1,
            stop=("ab", "c"),
            stop_token_ids=(9, 11),
            min_tokens=2,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={7: 2.0, 200: -100.0},
            logprobs=3,
        ),
    ),
    Cancel("a"),
    Ask("q"),
]
ENCODED = [encode(message) for message in VALID]


@st.composite
def flipped(draw: st.DrawFn) -> bytes:
    """A valid message with bits turned over, bytes taken out or put in, or its end cut off."""
    data = bytearray(draw(st.sampled_from(ENCODED)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(["bit", "byte", "insert", "delete", "cut", "repeat"]))
        if how == "bit" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "byte" and data:
            data[at] = draw(st.sampled_from([0, 0x7F, 0x80, 0xC1, 0xC7, 0xCF, 0xDD, 0xDF, 0xFF]))
        elif how == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=5))
        elif how == "delete":
            del data[at : at + draw(st.integers(1, 4))]
        elif how == "cut":
            del data[at:]
        else:
            data += data[at:]
    return bytes(data)


NUMBERS = (
    st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64 - 1])
    | st.floats()
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers(-2, 300), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = [f for f in Submit.__struct_fields__ if f != "params"]


@st.composite
def mistyped(draw: st.DrawFn) -> bytes:
    """A message of the right shape whose fields hold anything."""
    message: dict[Any, Any] = {
        "type": draw(st.sampled_from(["submit", "submit", "cancel", "ask", "chunk", "", 3])),
        "id": draw(st.text(max_size=5) | st.sampled_from(["a", "i" * 129, "i" * 100_000])),
        "prompt": draw(st.text(max_size=9)),
    }
    for name in draw(st.lists(st.sampled_from([*FIELDS, "what", "other"]), max_size=3)):
        message[name] = draw(VALUES)
    message["params"] = {"max_tokens": draw(st.integers(1, 4))}
    for name in draw(
        st.lists(st.sampled_from([*SamplingParams.__struct_fields__, "other"]), max_size=3)
    ):
        message["params"][name] = draw(VALUES)
    return encode(message)


RANGES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 1e-300, 1e-6, 1.0, 100.0]),
    "top_p": st.sampled_from([1e-300, 1e-6, 0.5, 1.0]),
    "top_k": st.sampled_from([0, 1, 2**31 - 1]),
    "min_p": st.sampled_from([0.0, 1e-300, 1.0]),
    "seed": st.sampled_from([0, 2**63 - 1]),
    "ignore_eos": st.booleans(),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=16),
    "stop_token_ids": st.lists(st.integers(0, 258), max_size=64),
    "include_stop_str_in_output": st.booleans(),
    "repetition_penalty": st.sampled_from([1e-300, 0.01, 1.0, 100.0]),
    "presence_penalty": st.sampled_from([-2.0, 2.0]),
    "frequency_penalty": st.sampled_from([-2.0, 2.0]),
    "logit_bias": st.dictionaries(
        st.integers(0, 258), st.sampled_from([-100.0, 1e-300, 100.0]), max_size=9
    ),
    "logprobs": st.integers(0, 20),
    "n": st.integers(1, 3),
    "min_tokens": st.integers(0, 4),
}


@st.composite
def extreme(draw: st.DrawFn) -> Submit:
    """A valid request with settings at the ends of their ranges."""
    names = draw(st.lists(st.sampled_from(list(RANGES)), max_size=6, unique=True))
    params = {name: draw(RANGES[name]) for name in names}
    for name in ("stop", "stop_token_ids"):
        if name in params:
            params[name] = tuple(params[name])
    return Submit(
        id="extreme",
        prompt=draw(st.text(min_size=1, max_size=20)),
        params=SamplingParams(max_tokens=draw(st.sampled_from([4, 5, 24])), **params),
    )


ODD_FRAMES: list[list[bytes]] = [
    [b""],
    [b"", ENCODED[0]],
    [ENCODED[0], b""],
    [ENCODED[4], ENCODED[4]],
    [b"x"] * 2000,
    [b"\x91" * 200_000],
    [b"\x81\xa1a" * 100_000 + b"\xc0"],
    [encode({"type": "submit", "id": "q", "prompt": "x"})[:-1] + b"\xdb\xff\xff\xff\xff"],
    [b"\xdd\xff\xff\xff\xff"],
    [b"\xdf\xff\xff\xff\xff"],
    [b"\xc9\xff\xff\xff\xff\x01"],
    [encode({"type": "submit", "id": "i" * 5_000_000, "prompt": "x"})],
    [encode({"type": "ask", "id": "i" * 5_000_000})],
    [encode({"type": "dance" * 500_000, "id": "q"})],
    [encode({"type": "submit", "id": "q", "params": {"o" * 3_000_000: 1}})],
    [encode({"type": "submit", "id": "q", "prompt": "x", "params": {"stop": ["s" * 10**6]}})],
    [b"\x00" * (9 << 20)],
]
"""No messages, or ones that must not be believed; the last is over the limit."""


def deep(levels: int) -> bytes:
    """A request whose schema is nested that deep."""
    inner = b"\x81\xa1a" * levels + b"\xc0"
    schema = b"\x81\xa6schema" + inner
    wanted = b"\x82\xa4type\xabjson_schema\xabjson_schema" + schema
    params = b"\x82\xaamax_tokens\x03\xafresponse_format" + wanted
    return b"\x84\xa4type\xa6submit\xa2id\xa1q\xa6prompt\xa1x\xa6params" + params


def zmtp_greeting(mechanism: bytes = b"NULL") -> bytes:
    """What a ZMTP 3.1 peer says first (rfc.zeromq.org/spec/23)."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" * 32


def zmtp_ready(kind: bytes = b"DEALER") -> bytes:
    """The READY command of the NULL mechanism."""
    name = b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    body = b"\x05READY" + name
    return b"\x04" + bytes([len(body)]) + body


RAW_BYTES: list[bytes] = [
    b"",
    b"\0" * 100,
    b"\xff" * 5000,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    zmtp_greeting()[:20],
    zmtp_greeting(b"CURVE"),
    zmtp_greeting(b"\xff" * 20),
    zmtp_greeting() + b"\x04\xff",
    zmtp_greeting() + b"\x04\x05READY",
    zmtp_greeting() + zmtp_ready(b"PUB"),
    zmtp_greeting() + zmtp_ready(b"\xff\xff"),
    zmtp_greeting() + zmtp_ready() + b"\xff" * 64,
    zmtp_greeting() + zmtp_ready() + b"\x02" + b"\x7f" + b"\xff" * 7 + b"body",
    zmtp_greeting() + zmtp_ready() + b"\x02" + (1 << 31).to_bytes(8, "big") + b"body",
    zmtp_greeting() + zmtp_ready() + b"\x01\x05hello" * 50,
    zmtp_greeting() + zmtp_ready() + b"\x04\x06\x04PING\0",
    zmtp_greeting() + zmtp_ready() + b"\x04\x09\x08SUBSCRIBE",
]
"""What no ZeroMQ library sends."""


def raw_connection(path: str) -> socket.socket:
    """A plain connection to a socket file."""
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(WAIT)
    made.connect(path)
    return made
