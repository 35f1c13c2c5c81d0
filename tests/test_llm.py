import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from ipc.messages.client import ChatMessage
from ssd_pipe import LLM, SamplingParams
from ssd_pipe.config import PipelineConfig, config_from_mapping
from ssd_pipe.config_load import load
from ssd_pipe.errors import ConfigError, ModelError, PeerLost, RequestError
from ssd_pipe.hub import TARGET_NAME, resolve
from ssd_pipe.owned_process import OwnedProcess, to_toml, up_command
from tests.frontend_peer import TEMPLATE
from tests.pipelines import byte_model
from tests.waiting import wait_for

WAIT = 20.0
RESTART = 120.0  # seconds a group may take to come back
SMALL = {"scheduler.max_model_len": 512}


def python(code):
    return [sys.executable, "-u", "-c", code]


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {
            "mode": "sd",
            "target": {"model": 'quo"te\\ ü\n\x7f', "cpus": [0, 1]},
            "speculation": {"k": 2, "fan_out": [3, 2, 1], "saguaro_c": 0.5, "rule": "rejection"},
            "cache": {"prefix_caching": False},
            "run": {"ready_timeout": 1.5, "name": "a"},
        },
    ],
)
def test_a_configuration_survives_the_file_it_travels_in(tmp_path, mapping):
    config = config_from_mapping(mapping)
    (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
    assert load(tmp_path / "c.toml", {}) == config


def test_a_run_without_a_name_gets_a_fresh_one(tmp_path):
    names = set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        up_command(PipelineConfig(), folder)
        names.add(load(folder / "config.toml", {}).run.name)
    assert len(names) == 2
    assert "" not in names


def test_the_last_words_are_the_error_line_and_the_output():
    process = OwnedProcess(python("print('a'); print('error: no luck'); print('b'); exit(3)"))
    assert process.last_words(WAIT) == ("no luck", "a\nerror: no luck\nb")
    assert not process.running
    silent = OwnedProcess(python("exit(4)"))
    assert silent.last_words(WAIT) == ("exit status 4", "")


def test_stop_ends_a_child_that_ignores_term():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    process = OwnedProcess(python(code))
    assert process.running
    process.stop(0.2)
    assert not process.running
    process.stop(0.2)


def test_a_command_that_is_not_there_is_one_line():
    with pytest.raises(PeerLost, match="cannot start /no/such"):
        OwnedProcess(["/no/such"])


def test_the_child_dies_with_its_owner():
    code = (
        "import sys, time; from ssd_pipe.owned_process import OwnedProcess;"
        "p = OwnedProcess([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(p._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as owner:
        child = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    _, alive = psutil.wait_procs([child], WAIT)
    assert not alive


def test_a_wrong_setting_starts_nothing():
    with pytest.raises(ConfigError, match=r"speculation\.k: must be 1\.\.32"):
        LLM(k=0)
    with pytest.raises(TypeError, match=r"besides it speculation\.k"):
        LLM(k=3, config=PipelineConfig())


def test_a_wrong_model_starts_nothing(tmp_path):
    for name in ("/no/such", "nosuch"):
        with pytest.raises(ModelError, match=f"'{name}': no such folder"):
            LLM(name, mode="ar")
    target, other = byte_model(tmp_path, "target"), byte_model(tmp_path, "other", vocab_size=300)
    with pytest.raises(ConfigError, match=r"draft\.model: vocabulary of 300"):
        LLM(str(target), str(other))


def test_a_pipeline_that_does_not_start_says_why(tmp_path):
    model = str(byte_model(tmp_path, "target"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PeerLost, match=r"while it was starting: .* in use"):
            LLM(model, mode="ar", settings={"run.endpoint": endpoint})


def test_a_pipeline_is_restarted_and_goes_on(tmp_path):
    settings = {"run.on_failure": "restart", "run.log_dir": str(tmp_path), "target.threads": 1}
    with LLM(str(byte_model(tmp_path, "target")), mode="ar", settings=settings) as own:
        before = own.generate("x", max_tokens=4, ignore_eos=True)
        victim = target_pid(own)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: target_pid(own) not in (0, victim), RESTART)
        after = own.generate("x", max_tokens=4, ignore_eos=True)
        assert [r.token_ids for r in after] == [r.token_ids for r in before]
        [folder] = tmp_path.glob("*/supervisor.jsonl")
        assert "ready file" not in folder.read_text()


def test_conversations_are_answered_together_and_in_order(tmp_path):
    model = byte_model(tmp_path, "target")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    settings = {"run.log_dir": str(tmp_path), "target.threads": 1, "scheduler.max_waiting": 2}
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    turns = [{"role": "user", "content": "one"}]
    with LLM(str(model), mode="ar", settings=settings) as llm:
        one, two, three = (llm.chat(text, params) for text in ("one", "two", "three"))
        assert len({r.token_ids for r in (one, two, three)}) == 3
        assert llm.chat(turns, params).token_ids == one.token_ids
        assert llm.chat([ChatMessage("user", "two")], params).token_ids == two.token_ids
        together = llm.chat([turns, "two", [ChatMessage("user", "three")]], params)
        assert [r.token_ids for r in together] == [r.token_ids for r in (one, two, three)]
        assert [r.token_ids for r in llm.chat(["one"], params)] == [one.token_ids]
        each = [params, SamplingParams(max_tokens=2, ignore_eos=True)]
        lengths = [len(r.token_ids) for r in llm.chat([turns, turns], each)]
        assert lengths == [6, 2]
        forms = ("one", {"prompt": "one"}, list(b"one"), {"prompt_token_ids": list(b"one")})
        texts = [llm.generate(form, params) for form in forms]
        assert [len(results) for results in texts] == [1, 1, 1, 1]
        assert texts[0][0].token_ids != texts[2][0].token_ids
        assert [r[0].token_ids for r in texts[::2]] == [r[0].token_ids for r in texts[1::2]]
        batch = llm.generate(forms, params)
        assert [r.token_ids for r in batch] == [r[0].token_ids for r in texts]
        with pytest.raises(RequestError, match="prompts: must be a prompt"):
            llm.generate(None)
        thinking = llm.chat([turns, turns], params, chat_template_kwargs={"thinking": True})
        assert [r.token_ids == one.token_ids for r in thinking] == [False, False]
        with pytest.raises(ValueError, match="2 conversations, but 1 params"):
            llm.chat(["one", "two"], [params])
        turn = {"role": "user", "content": "x"}
        for wrong in ([], {}, turn, ChatMessage("user", "x"), [turns, turn], [["x"]]):
            with pytest.raises(RequestError, match="messages") as caught:
                llm.chat(wrong, params)
            assert (caught.value.code, caught.value.field) == (400, "messages")


def target_pid(own):
    """Of the target, once the whole group is ready; else 0."""
    try:
        processes = own.status().processes
    except PeerLost:
        return 0
    ready = {p.name: p.pid for p in processes if p.state == "ready"}
    return ready.get("target-0", 0) if len(ready) == len(processes) else 0


@pytest.fixture(scope="module")
def llm():
    try:
        resolve(TARGET_NAME)
    except ModelError as error:
        pytest.skip(str(error))
    with LLM(mode="ssd", settings=SMALL) as made:
        yield made


@pytest.mark.slow
def test_prompts_are_answered_together_and_in_order(llm):
    prompts = ["def add(a, b):", "The capital of France is", "1, 2, 3, 4,"]
    together = llm.generate(prompts, max_tokens=12)
    alone = [llm.generate(p, max_tokens=12)[0] for p in prompts]
    assert [r.text for r in together] == [r.text for r in alone]
    ids = llm.generate([list(r.token_ids) for r in alone], max_tokens=1)
    assert [len(r.token_ids) for r in ids] == [1, 1, 1]
    assert llm.status().mode == "ssd"
    assert "Paris" in llm.chat("What is the capital of France?", max_tokens=12).text
    text = "".join(chunk.text for chunk in llm.stream(prompts[0], max_tokens=12))
    assert text == alone[0].text
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(["fine", ""])
    with pytest.raises(ValueError, match="3 prompts, but 1 params"):
        llm.generate(prompts, [None])


@pytest.mark.slow
def test_a_process_that_dies_is_named(llm):
    del llm  # the model is here
    with LLM(mode="ar", settings=SMALL) as own:
        pids = {p.name: p.pid for p in own.status().processes}
        stream = own.stream("x", max_tokens=400, ignore_eos=True)
        next(stream)
        os.kill(pids["target-0"], signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(PeerLost, match="target-0: was killed by SIGKILL"):
            own.generate("x", max_tokens=400, ignore_eos=True)
        assert time.monotonic() - begun < WAIT
