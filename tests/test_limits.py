"""Limits of length, time and number through running pipelines, in every mode."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_pipe.client import Client, Stream
from ssd_pipe.errors import RequestError
from ssd_pipe.params import SamplingParams
from tests.test_pipeline import encode, pipeline
from tests.waiting import wait_for

MODES = ["ar", "sd", "ssd"]
LIMIT, K = 200, 5  # of the pipelines that ``pipeline`` starts
LONG = SamplingParams(max_tokens=LIMIT, ignore_eos=True)


@pytest.fixture(scope="module")
def clients(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Client]]:
    folder = tmp_path_factory.mktemp("l")
    shm = folder / "shm"
    shm.mkdir()
    few = ("--set", "scheduler.max_waiting=12", "--k", str(K))
    with (
        pipeline(pair, folder, shm, "ar", *few) as ar,
        pipeline(pair, folder, shm, "sd", *few) as sd,
        pipeline(pair, folder, shm, "ssd", *few) as ssd,
    ):
        yield {"ar": ar.client, "sd": sd.client, "ssd": ssd.client}


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return encode("".join(chr(rng.randrange(97, 123)) for _ in range(length)))


def idle(client: Client) -> bool:
    """Nothing runs or waits, and every block is free."""
    counters = client.status().counters
    busy = counters["running"] + counters["waiting"] + counters["frontend_open_requests"]
    return not busy and counters["free_blocks"] == counters["total_blocks"]


@pytest.mark.parametrize("room", range(1, 2 * K + 3))
def test_an_answer_fills_the_context_to_the_last_token(
    clients: dict[str, Client], room: int
) -> None:
    """``room`` tokens fit behind the prompt: the end falls on every place of a chain."""
    answers = [
        client.generate(token_ids=prompt(LIMIT - room), params=LONG) for client in clients.values()
    ]
    for answer in answers:
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == room
        assert answer.token_ids == answers[0].token_ids


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_leaves_no_room_is_refused(clients: dict[str, Client], mode: str) -> None:
    with pytest.raises(RequestError, match="max_model_len = 200") as caught:
        clients[mode].generate(token_ids=prompt(LIMIT), params=LONG)
    assert caught.value.code == 400


@pytest.mark.parametrize("mode", MODES)
def test_a_full_line_refuses_one_more_and_the_rest_is_served(
    clients: dict[str, Client], mode: str
) -> None:
    client = clients[mode]
    streams = [client.stream(token_ids=prompt(9), params=LONG) for _ in range(30)]
    served, refused = 0, 0
    for stream in streams:
        try:
            served += len(stream.result().token_ids) == LIMIT - 9
        except RequestError as error:
            refused += error.code == 429 and "12 requests" in str(error)
    assert served >= 12
    assert refused > 0
    assert served + refused == 30
    assert idle(client)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["timeout", "cancel", "leave"])
def test_requests_end_early_at_any_stage_and_leave_nothing_behind(
    clients: dict[str, Client], mode: str, way: str
) -> None:
    """Waiting, in their prompts, decoding: whatever they are at after a random time."""
    rng = random.Random(way)
    client = clients[mode]
    lengths = [rng.randrange(1, 150) for _ in range(4)]
    expected = [client.generate(token_ids=prompt(n, n), params=LONG).token_ids for n in lengths]
    with Client(client.endpoint) as leaving:
        streams: list[tuple[int, Stream]] = []
        for i in range(12):
            params = LONG
            if way == "timeout":
                params = SamplingParams(
                    max_tokens=LIMIT, ignore_eos=True, timeout=rng.choice([0.002, 0.02, 0.1, 60.0])
                )
            n = lengths[i % 4]
            used = leaving if way == "leave" and i % 2 else client
            streams.append((i % 4, used.stream(token_ids=prompt(n, n), params=params)))
        begun: dict[int, tuple[int, ...]] = {}
        if way == "cancel":
            for i in range(0, 12, 2):
                begun[i] = next(streams[i][1]).token_ids  # by then the others are anywhere
                streams[i][1].cancel()
            for i in range(1, 12, 4):
                streams[i][1].cancel()
        elif way == "leave":
            begun[0] = next(streams[0][1]).token_ids
    ends = set()
    for i, (which, stream) in enumerate(streams):
        if way == "leave" and i % 2:
            continue
        tokens = begun.get(i, ())
        try:
            for chunk in stream:
                tokens += chunk.token_ids
                end = chunk.finish_reason
        except RequestError as error:
            end = "timeout" if error.code == 504 else str(error)
        ends.add(end)
        assert expected[which][: len(tokens)] == tokens
        assert end != "length" or tokens == expected[which]
    assert "length" in ends
    assert ends <= {"length", {"timeout": "timeout", "cancel": "cancelled", "leave": "length"}[way]}
    wait_for(lambda: idle(client), 20)
