"""Failures people have reported of serving engines, provoked in running pipelines of every mode.

What one thread can show is in ``tests/rounds/test_cases.py``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from safetensors.numpy import load_file, save_file

from ipc.messages.client import Chunk, ServerMessage, Submit
from ssd_pipe.client import Client, Result
from ssd_pipe.errors import RequestError
from ssd_pipe.params import SamplingParams
from tests.models.tiny import perturbed
from tests.pipelines import byte_model, command
from tests.test_pipeline import Pipeline, encode, pipeline
from tests.waiting import wait_for

MODES = ("ar", "sd", "ssd")
K = 5
EOS_IDS = (2, 70, 72)
LETTER = 75  # a token that no rule knows
LIMIT = 200  # of tests.test_pipeline's pipelines: prompt and output; a chunk is 48 tokens
WAIT = 30.0
SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 40, "ignore_eos": True}
in_every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose generation config lists several EOS ids, and a draft that often agrees."""
    folder = tmp_path_factory.mktemp("pair")
    target = byte_model(folder, "target")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": list(EOS_IDS)}))
    return target, perturbed(target, folder / "draft", 0.1)


@pytest.fixture(scope="module")
def runs(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Pipeline]]:
    folder = tmp_path_factory.mktemp("f")
    shm = folder / "shm"
    shm.mkdir()
    with ExitStack() as stack:
        # Rounds must happen however little they pay with models this small.
        always = ["--backup", "jit"]
        yield {
            mode: stack.enter_context(pipeline(pair, folder, shm, mode, *always)) for mode in MODES
        }


def same_everywhere(runs: dict[str, Pipeline], prompt: str = "x = [", **params: Any) -> Result:
    """The answer of every mode: same tokens, text, reason; log probabilities within rounding."""
    results = [run.client.generate(prompt, SamplingParams(**params)) for run in runs.values()]
    first = results[0]
    for other in results[1:]:
        assert (other.token_ids, other.text) == (first.token_ids, first.text)
        assert other.finish_reason == first.finish_reason
        assert len(other.logprobs) == len(first.logprobs)
        for mine, theirs in zip(first.logprobs, other.logprobs, strict=True):
            assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
            assert [t.token_id for t in mine.top] == [t.token_id for t in theirs.top]
            assert theirs.logprob == pytest.approx(mine.logprob, abs=1e-4)
            for a, b in zip(mine.top, theirs.top, strict=True):
                assert b.logprob == pytest.approx(a.logprob, abs=1e-4)
    for result in results:
        assert result.metrics is not None
        assert result.metrics.output_tokens == len(result.token_ids)
    return first


@pytest.mark.parametrize("eos", EOS_IDS)
@pytest.mark.parametrize("place", range(K + 2))
def test_every_eos_ends_at_every_place_unless_ignored(
    runs: dict[str, Pipeline], eos: int, place: int
) -> None:
    """A bias makes it the choice from the start, min_tokens hold it back up to ``place``: with
    place 1, it is the first draft token that is accepted. ``max_tokens`` end the answer just where
    it does, or one token later."""
    bias = {eos: 100.0, LETTER: 50.0}
    params = {"logit_bias": bias, "min_tokens": place, "logprobs": 0}
    for limit in (place + 1, place + 2, 30):
        result = same_everywhere(runs, **params, max_tokens=limit)
        assert result.token_ids == (LETTER,) * place + (eos,)
        assert result.finish_reason == "stop"
        assert len(result.logprobs) == place + 1
    others = bias | {other: -100.0 for other in EOS_IDS if other != eos}
    result = same_everywhere(runs, logit_bias=others, max_tokens=9, ignore_eos=True)
    assert (result.token_ids, result.finish_reason) == ((eos,) * 9, "length")


@pytest.mark.parametrize("top", [0, 4])
def test_logprobs_are_those_without_speculation(runs: dict[str, Pipeline], top: int) -> None:
    for params in (SAMPLED, SAMPLED | {"temperature": 0.0}):
        result = same_everywhere(runs, **params, logprobs=top)
        assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
        assert {len(entry.top) for entry in result.logprobs} == {top}


@pytest.mark.parametrize("place", [3, 6, 7])
def test_a_stop_text_and_what_is_told_with_it(runs: dict[str, Pipeline], place: int) -> None:
    letters = {encode(c)[0]: 20.0 for c in "abcdefghijklmnopqrstuvwxyz"}
    params = SAMPLED | {"logit_bias": letters, "logprobs": 0}
    whole = same_everywhere(runs, **params)
    stop = whole.text[place - 1 : place + 1]
    end = whole.text.index(stop) + 2
    result = same_everywhere(runs, **params, stop=(stop,))
    assert (result.text, result.finish_reason) == (whole.text[: end - 2], "stop")
    assert result.token_ids == whole.token_ids[:end]
    assert len(result.logprobs) == end


@in_every_mode
def test_an_empty_prompt_is_an_error_and_no_more(runs: dict[str, Pipeline], mode: str) -> None:
    client = runs[mode].client
    for prompt in ({"prompt": ""}, {"token_ids": []}, {"messages": []}):
        with pytest.raises(RequestError, match="empty") as caught:
            client.generate(**prompt)
        assert (caught.value.code, caught.value.field) == (400, next(iter(prompt)))
    with pytest.raises(RequestError, match="exactly one"):
        client.generate()
    assert len(client.generate("a", max_tokens=3, ignore_eos=True).token_ids) == 3


@in_every_mode
def test_a_prompt_beyond_the_context_is_refused_at_once(
    runs: dict[str, Pipeline], mode: str
) -> None:
    client = runs[mode].client
    for prompt in (
        {"token_ids": [5] * LIMIT},
        {"prompt": "y" * LIMIT},
        {"prompt": "y" * 7_000_000},
    ):
        begun = time.monotonic()
        with pytest.raises(RequestError, match=f"max_model_len = {LIMIT}") as caught:
            client.generate(**prompt)
        assert (caught.value.code, caught.value.field) == (400, next(iter(prompt)))
        assert time.monotonic() - begun < 2


def test_the_last_tokens_before_the_context_ends(runs: dict[str, Pipeline]) -> None:
    """A whole round no longer fits; the answer ends with "length" exactly at the limit."""
    for room in range(1, K + 3):
        prompt = "z" * (LIMIT - room)  # several chunks, too
        result = same_everywhere(runs, prompt, **SAMPLED | {"max_tokens": 100})
        assert (len(result.token_ids), result.finish_reason) == (room, "length")


@in_every_mode
def test_a_hundred_clients_drop_in_mid_stream(runs: dict[str, Pipeline], mode: str) -> None:
    """Each has had its first token; none says goodbye."""
    run = runs[mode]
    before = run.generate("after all", max_tokens=12)
    params = SamplingParams(max_tokens=150, ignore_eos=True, temperature=1.0)
    decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)
    poller, waiting = zmq.Poller(), set()
    for number in range(100):
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(run.client.endpoint)
        submit = Submit(id="a", prompt=f"client {number}", params=params)
        socket.send(msgspec.msgpack.encode(submit))
        poller.register(socket, zmq.POLLIN)
        waiting.add(socket)
    dropped = 0
    while waiting:
        ready = dict(poller.poll(WAIT * 1000))
        assert ready, "no first token"
        for socket in ready:
            message = decoder.decode(socket.recv())
            assert isinstance(message, Chunk), message
            dropped += message.finish_reason is None
            poller.unregister(socket)
            waiting.remove(socket)
            socket.close(0)
    assert dropped > 90  # the others had their whole answer in the first chunk
    settled(run.client)
    assert run.generate("after all", max_tokens=12) == before


def settled(client: Client) -> dict[str, float]:
    """The counters once every block of target and draft is free again."""

    def free() -> bool:
        counters = client.status().counters
        return (
            counters["running"] == counters["waiting"] == counters["frontend_open_requests"] == 0
            and counters["free_blocks"] == counters["total_blocks"]
            and counters.get("draft_free_blocks") == counters.get("draft_total_blocks")
        )

    wait_for(free)
    return client.status().counters


def test_draft_blocks_are_told(runs: dict[str, Pipeline]) -> None:
    for mode, run in runs.items():
        run.generate("a")
        counters = settled(run.client)
        assert ("draft_total_blocks" in counters) == (mode != "ar")


@pytest.mark.parametrize(("mode", "victim"), [("ar", "target"), ("ssd", "draft")])
def test_a_missing_weight_is_a_start_up_error_that_names_it(
    pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path, mode: str, victim: str
) -> None:
    """All models of this file have tied embeddings and no lm_head, which is none."""
    name = "model.layers.1.mlp.up_proj.weight"
    models = dict(zip(("target", "draft"), pair, strict=True))
    broken = tmp_path / "broken"
    shutil.copytree(models[victim], broken)
    weights = load_file(broken / "model.safetensors")
    assert "lm_head.weight" not in weights
    del weights[name]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    models[victim] = broken
    done = subprocess.run(
        command(
            *("up", "--no-pull", "--mode", mode, "--log-dir", str(tmp_path)),
            *("--target", str(models["target"]), "--draft", str(models["draft"])),
            *("--set", f"run.shm_dir={shm_dir}"),
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert name in last
    assert str(broken) in last
    assert not list(shm_dir.glob("*/*"))


def test_tensor_parallel_ranks_are_fed_the_same_tokens(
    pair: tuple[Path, Path], tmp_path: Path, shm_dir: Path, runs: dict[str, Pipeline]
) -> None:
    """At temperature 1; what a rank is fed next is what was sampled before."""
    prompts = ["one", "two and more", "three", "four"]
    with pipeline(pair, tmp_path, shm_dir, "ssd", "--tp", "2", "--backup", "jit") as run:
        answers = run.together(prompts, temperature=1.0, seed=3)
        [folder] = (tmp_path / "logs").iterdir()
        assert answers == runs["ar"].together(prompts, temperature=1.0, seed=3)
    fed = []
    for rank in range(2):
        lines = map(json.loads, (folder / f"target-{rank}.jsonl").read_text().splitlines())
        fed.append({e["step"]: e["fed"] for e in lines if e["event"] == "verify"})
    assert len(fed[0]) > 10
    assert fed[0] == fed[1]
    assert len(set(fed[0].values())) > 10


ON_64_MIB = [
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
    *('mount -t tmpfs -o size=64m none "$1" && shift && exec "$@"', "sh"),
]


@pytest.fixture(scope="module")
def can_mount(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where this user may not mount a file system even in a namespace of its own."""
    place = tmp_path_factory.mktemp("mount")
    try:
        done = subprocess.run([*ON_64_MIB, str(place), "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode:
        pytest.skip(done.stderr.decode(errors="replace").strip())


@in_every_mode
@pytest.mark.usefixtures("can_mount")
def test_a_small_dev_shm_names_the_size_needed(tmp_path: Path, shm_dir: Path, mode: str) -> None:
    """A file system of 64 MiB of its own, as containers have it by default."""
    big = byte_model(tmp_path, "big")
    config = json.loads((big / "config.json").read_text())
    config |= {"vocab_size": 2**20, "num_attention_heads": 40, "num_key_value_heads": 20}
    (big / "config.json").write_text(json.dumps(config | {"head_dim": 8}))
    needs_much = ["--tp", "20"] if mode == "ar" else ["--rule", "rejection"]
    arguments = [
        *("up", "--no-pull", "--mode", mode, "--target", str(big), "--draft", str(big)),
        *("--set", f"run.shm_dir={shm_dir}", "--log-dir", str(tmp_path), *needs_much),
    ]
    done = subprocess.run(
        [*ON_64_MIB, str(shm_dir), *command(*arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert "not enough shared memory" in line
    needed, available = (int(word) for word in line.split() if word.isdecimal())
    assert needed > 64 >= available > 60
