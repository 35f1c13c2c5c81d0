"""Servers as engines: our own gateway started as one, and servers that know less."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.build import Builder, check
from bench.engines import PipelineEngine, running
from bench.servers import launch, metrics
from bench.servers.completions import Completions
from bench.servers.engine import ServerEngine
from ipc.rundir import list_runs
from ssd_pipe.config import PipelineConfig
from ssd_pipe.config_load import load
from ssd_pipe.errors import ConfigError, PeerLost, RequestError
from ssd_pipe.params import SamplingParams
from ssd_pipe.text.tokenizer import Tokenizer
from tests.http.played_server import played
from tests.pipelines import byte_model

PROMPT = [10, 20, 30, 40]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
ALWAYS = {"speculation.backup": "jit", "speculation.adaptive": False}  # whether it pays or not


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("models"), "target")


@pytest.fixture
def config(model: Path, shm_dir: Path, tmp_path: Path) -> PipelineConfig:
    # The model drafts for itself, so that every chain is accepted.
    settings = {"target.model": str(model), "draft.model": str(model), "speculation.k": 3}
    settings |= {"run.shm_dir": str(shm_dir), "run.log_dir": str(tmp_path / "logs")}
    return load(None, {**settings, "target.threads": 1, **ALWAYS})


def builder(model: Path, **more: Any) -> Builder:
    return Builder(tokenizer=Tokenizer.load(model), host_cpus=[], **more)


def test_our_gateway_is_an_engine_like_the_others(
    model: Path, config: PipelineConfig, shm_dir: Path
) -> None:
    engine = builder(model).engine("ssd-http", "own", config)
    ours = PipelineEngine("ssd", config)
    with running([engine, ours]):
        before = engine.counters()
        answer = engine.generate(PROMPT, GREEDY)
        after = engine.counters()
        assert answer.tokens == ours.generate(PROMPT, GREEDY).tokens
        assert answer.finish == "length"
        assert sum(count for _, count in answer.arrivals) == 16
        assert len(answer.arrivals) < 16  # pieces are rounds
        times = [answer.started, *(t for t, _ in answer.arrivals)]
        assert times == sorted(times)
        assert after["rounds"] - before.get("rounds", 0) >= 3
        assert after["accepted"] > before.get("accepted", 0)
        assert after["accepted_at_3"] > 0
        assert after["judged_at_0"] == after["rounds"]
        assert after["hits"] + after["misses"] > 0
        assert after["draft_busy_seconds"] > 0
        settings = engine.facts.settings
        assert "up" in settings["command"]
        # A server that runs already is spoken to the same way.
        other = builder(model, servers={"mine": settings["url"]}).engine("mine", "own", config)
        with running([other]):
            assert other.generate(PROMPT, GREEDY).tokens == answer.tokens
            assert other.facts.settings["model"] == launch.MODEL_NAME
    assert not list_runs(str(shm_dir))


def test_a_server_that_ends_says_why(model: Path, tmp_path: Path) -> None:
    program = "import sys; print('no such device'); sys.exit(3)"

    def command(port: int, folder: Path) -> list[str]:
        return [sys.executable, "-c", program]

    engine = ServerEngine("broken", Tokenizer.load(model), command)
    with (
        pytest.raises(PeerLost, match=r"broken: the server ended: .*no such device"),
        running([engine]),
    ):
        pass


def test_a_server_that_never_gets_healthy_is_given_up(model: Path) -> None:
    program = "import time; time.sleep(600)"

    def command(port: int, folder: Path) -> list[str]:
        return [sys.executable, "-c", program]

    engine = ServerEngine("stuck", Tokenizer.load(model), command, deadline=1.0)
    with pytest.raises(PeerLost, match="health: not 200 in 1 s"), running([engine]):
        pass


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": words, "finish_reason": more.pop("finish", None)}], **more}


def test_counts_come_from_usage_where_no_ids_come(model: Path) -> None:
    pieces = [
        text("ab", usage={"completion_tokens": 2}),
        text("c", usage={"completion_tokens": 5}, finish="length"),
        {"choices": [], "usage": {"completion_tokens": 5}},
    ]
    with played(*pieces, refused=["return_token_ids"]) as place:
        client = Completions(place.url, "", "", Tokenizer.load(model))
        answer = client.generate(PROMPT, SamplingParams(max_tokens=5))
        client.close()
    assert [count for _, count in answer.arrivals] == [2, 3]
    assert answer.finish == "length"


def test_counts_come_from_the_text_where_no_usage_comes(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    pieces = [text("ab"), text("c"), text("", finish="stop")]
    refused = ["return_token_ids", "continuous_usage_stats", "ignore_eos"]
    with played(*pieces, refused=refused) as place:
        client = Completions(place.url, "", "", tokenizer)
        answer = client.generate(PROMPT, SamplingParams(max_tokens=5))
        assert [count for _, count in answer.arrivals] == [2, 1]
        assert answer.tokens == tokenizer.encode("abc")
        with pytest.raises(RequestError, match="ignore_eos"):
            client.generate(PROMPT, GREEDY)
        client.close()


def test_errors_of_a_server_are_one_line_each(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    with played(text("a"), {"error": {"message": "out of memory"}}) as place:
        url = place.url
        client = Completions(url, "m", "", tokenizer)
        assert client.healthy()
        with pytest.raises(RequestError, match="the server answered: out of memory"):
            client.generate(PROMPT, GREEDY)
        client.close()
    client = Completions(url, "m", "", tokenizer)
    assert not client.healthy()
    with pytest.raises(PeerLost, match=r"/v1: .*refused"):
        client.generate(PROMPT, GREEDY)
    client.close()


def test_counters_are_vllms() -> None:
    page = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
"""
    assert metrics.counters(page) == {
        "rounds": 10.0,
        "accepted": 12.0,
        "accepted_at_0": 2.0,
        "accepted_at_1": 4.0,
        "accepted_at_2": 4.0,
        "judged_at_0": 10.0,
        "judged_at_1": 8.0,
        "judged_at_2": 0.0,
    }
    assert metrics.counters("") == {}


def test_an_engine_that_is_not_installed_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="vllm is not installed here; pip install vllm"):
        check(["ar", "vllm-sd"], {})
    check(["vllm-sd"], {"vllm-sd": "http://127.0.0.1:1"})


def test_command_lines_serve_the_same_models_and_limits() -> None:
    served = launch.Served(
        target=Path("/t"),
        draft=Path("/d"),
        k=4,
        tp=2,
        dtype="auto",
        max_model_len=2048,
        seqs=8,
        seed=0,
    )
    plain, sd = (launch.command(name, served, 8123) for name in launch.VLLM)
    assert sd[: len(plain)] == plain
    assert sd[len(plain)] == "--speculative-config"
    speculation = json.loads(sd[-1])
    assert speculation == {"method": "draft_model", "model": "/d", "num_speculative_tokens": 4}
    assert plain[plain.index("--max-model-len") + 1] == "2048"
    assert plain[plain.index("--tensor-parallel-size") + 1] == "2"
    plain, sd = (launch.command(name, served, 8123) for name in launch.SGLANG)
    assert sd[: len(plain)] == plain
    assert sd[sd.index("--speculative-algorithm") + 1] == "STANDALONE"
    assert sd[sd.index("--speculative-num-steps") + 1] == "4"
    assert sd[sd.index("--speculative-num-draft-tokens") + 1] == "5"
    assert sd[sd.index("--context-length") + 1] == "2048"
