"""Configuration: from a file and the command line to a checked PipelineConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ssd_pipe.config import PipelineConfig
from ssd_pipe.config_load import (
    decode,
    load,
    parse_fan_out,
    parse_set,
    setting_names,
)
from ssd_pipe.config_paths import with_absolute_paths
from ssd_pipe.errors import ConfigError
from ssd_pipe.footprint import MIB, expected_bytes, shared_bytes
from ssd_pipe.threads import (
    SPIN_COUNT,
    THREAD_VARIABLES,
    lent_threads,
    process_cores,
    thread_count,
    thread_environment,
)
from tests.pipelines import byte_model


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pipe.toml"
    path.write_text(text)
    return path


def test_no_file_and_no_overrides_give_the_defaults() -> None:
    assert load(None, {}) == PipelineConfig()


def test_overrides_win_over_the_file_and_the_rest_of_a_section_stays(tmp_path: Path) -> None:
    path = write(tmp_path, 'mode = "sd"\n[speculation]\nk = 3\nfan_out = 2\n')
    config = load(path, {"speculation.k": 4, "target.tp": 2})
    assert (config.mode, config.speculation.k, config.speculation.fan_out) == ("sd", 4, 2)
    assert config.target.tp == 2


def test_json_of_a_config_reads_back_equal_with_the_same_digest() -> None:
    config = load(None, {"speculation.fan_out": [4, 3, 2, 2, 1, 6], "run.name": "x"})
    again = decode(msgspec.json.encode(config))
    assert again == config
    assert again.digest() == config.digest()


def test_paths_are_those_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("think", "home/draft", "smollm2-draft-16m", "org/here"):
        (tmp_path / name).mkdir(parents=True)

    def models(target: str, draft: str) -> tuple[str, str]:
        config = with_absolute_paths(load(None, {"target.model": target, "draft.model": draft}))
        return config.target.model, config.draft.model

    assert models("./think", "~/draft") == (f"{tmp_path}/think", f"{tmp_path}/home/draft")
    assert models("org/here", "org/away") == (f"{tmp_path}/org/here", "org/away")
    names = ("shape:llama-3.1-8b", "smollm2-draft-16m")
    assert models(*names) == names
    given = {"run.log_dir": "~/logs", "run.shm_dir": "s", "speculation.synthetic_acceptance": "0.7"}
    config = with_absolute_paths(load(None, given))
    assert (config.run.log_dir, config.run.shm_dir) == (f"{tmp_path}/home/logs", f"{tmp_path}/s")
    assert (config.run.curve_clients, config.speculation.synthetic_acceptance) == ("", "0.7")
    traced = with_absolute_paths(load(None, {"speculation.synthetic_acceptance": "t.json"}))
    assert traced.speculation.synthetic_acceptance == f"{tmp_path}/t.json"
    assert with_absolute_paths(traced) == traced


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("[speculation]\nkk = 3\n", "speculation.kk", "unknown setting (did you mean"),
        ("[speculations]\nk = 3\n", "speculations", "unknown section"),
        (
            "[speculatoin]\nk = 3\n",
            "speculatoin",
            "unknown section (did you mean speculation?)",
        ),
        ("k = 3\n", "k", "did you mean speculation.k?"),
        ("[speculation]\nk = 0\n", "speculation.k", "1..32, got 0"),
        ("[speculation]\nk = 33\n", "speculation.k", "got 33"),
        ('[speculation]\nk = "five"\n', "speculation.k", "Expected `int`"),
        ("[speculation]\nfan_out = 65\n", "speculation.fan_out", "0..64"),
        ("[speculation]\nfan_out = [1, 2]\n", "speculation.fan_out", "k + 1 = 6 counts, got 2"),
        ("[speculation]\nfan_out_miss = [1]\n", "speculation.fan_out_miss", "got 1"),
        ("[speculation]\nfan_out = 60\n", "speculation.fan_out", "1..256, got 360"),
        ('[target]\ntp = 2\ndevice = "cuda:1"\n', "target.device", "one per rank"),
        ('[draft]\ndevice = "gpu"\n', "draft.device", "'cuda:N'"),
        ('[run]\nendpoint = "localhost:80"\n', "run.endpoint", "tcp://HOST:PORT"),
        ('[run]\nendpoint = "tcp://127.0.0.1:99999"\n', "run.endpoint", "99999"),
        ('[run]\nendpoint = "tcp://*:5555"\n', "run.endpoint", "0.0.0.0"),
        ('[run]\nname = "a b"\n', "run.name", "letters"),
        ("[speculation]\ndisable_by_batch_size = -1\n", "speculation.disable_by_batch_size", "-1"),
        ("[scheduler]\nmax_batched_tokens = 63\n", "scheduler.max_batched_tokens", "= 64"),
        ('mode = "turbo"\n', "mode", "turbo"),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, text: str, field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text), {})
    assert caught.value.field == field
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_socket_path_that_is_too_long_is_refused_with_its_limit() -> None:
    with pytest.raises(ConfigError, match="at most 107"):
        load(None, {"run.endpoint": "ipc:///tmp/" + "x" * 120})


def test_missing_file_and_bad_toml_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match="no such file") as caught:
        load(missing, {})
    assert caught.value.field == str(missing)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(write(tmp_path, "mode = \n"), {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, {})


def test_an_override_below_a_plain_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mode: is a value"):
        load(write(tmp_path, 'mode = "ar"\n'), {"mode.x": 1})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("speculation.k=4", ("speculation.k", 4)),
        ("mode = ar", ("mode", "ar")),
        ("target.model='a=b'", ("target.model", "a=b")),
        ("target.model=org/name", ("target.model", "org/name")),
        ("draft.cpus=[0, 1]", ("draft.cpus", [0, 1])),
        ("cache.prefix_caching=false", ("cache.prefix_caching", False)),
        ("run.grace=2.5", ("run.grace", 2.5)),
        ("run.log_dir=", ("run.log_dir", "")),
    ],
)
def test_set_reads_toml_values_and_bare_words(text: str, expected: tuple[str, Any]) -> None:
    assert parse_set(text) == expected


@pytest.mark.parametrize("text", ["k", "=4", "draft.cpus=[0", "mode='ar", "mode=1\nx=2"])
def test_set_refuses_what_is_no_single_value(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_set(text)


def test_fan_out_on_the_command_line() -> None:
    assert parse_fan_out("3") == 3
    assert parse_fan_out("4,3,2,2,1,6") == [4, 3, 2, 2, 1, 6]
    assert parse_fan_out("[4, 3]") == [4, 3]
    for bad in ("", "x", "3,,2", "2.5"):
        with pytest.raises(ConfigError, match="comma-separated"):
            parse_fan_out(bad)


def test_every_setting_can_be_set_by_its_dotted_name() -> None:
    plain = msgspec.to_builtins(PipelineConfig())
    for name in setting_names():
        value: Any = plain
        for part in name.split("."):
            value = value[part]
        if value is not None:
            assert load(None, {name: value}) == PipelineConfig()


@pytest.mark.parametrize(
    ("mode", "cores", "target", "draft"),
    [("ssd", 1, 1, 1), ("ssd", 2, 1, 1), ("ssd", 8, 6, 2), ("sd", 8, 8, 8), ("ar", 4, 4, 4)],
)
def test_cores_are_split_by_mode(mode: str, cores: int, target: int, draft: int) -> None:
    config = load(None, {"mode": mode})
    assert thread_count(config, "target", cores) == target
    assert thread_count(config, "draft", cores) == draft
    assert thread_count(config, "scheduler", cores) == 1


def test_whoever_works_alone_has_all_cores_unless_a_setting_says_otherwise() -> None:
    assert lent_threads(load(None, {}), "target", 8) == 8
    assert lent_threads(load(None, {}), "draft", 8) == 8
    assert lent_threads(load(None, {"target.tp": 2}), "target", 8) == 4
    assert lent_threads(load(None, {"mode": "sd"}), "target", 8) == 8
    for setting in ({"draft.threads": 2}, {"target.cpus": [0]}):
        config = load(None, setting)
        for role in ("target", "draft"):
            assert lent_threads(config, role, 8) == thread_count(config, role, 8)


def test_target_ranks_share_the_cores_and_settings_win() -> None:
    assert thread_count(load(None, {"target.tp": 2, "mode": "ar"}), "target", 8) == 4
    assert thread_count(load(None, {"target.tp": 4, "mode": "ar"}), "target", 2) == 1
    assert thread_count(load(None, {"draft.threads": 5}), "draft", 2) == 5
    assert thread_count(load(None, {"draft.cpus": [0, 1, 2]}), "draft", 2) == 3


def test_threads_of_the_user_stay_unless_the_config_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in thread_environment(load(None, {}), "target")
    asked = thread_environment(load(None, {"target.threads": 3}), "target")
    assert asked == dict.fromkeys(THREAD_VARIABLES, "3") | {"GOMP_SPINCOUNT": SPIN_COUNT}


def test_footprint_grows_by_the_handover_of_the_rejection_rule_only() -> None:
    vocab = 50_000
    plain = shared_bytes(load(None, {}), vocab)
    rejection = shared_bytes(load(None, {"speculation.rule": "rejection"}), vocab)
    rows = 64 * 5
    assert abs(rejection - plain - rows * vocab * 4) <= MIB
    alone = load(None, {"mode": "ar", "speculation.rule": "rejection"})
    assert shared_bytes(alone, vocab) < plain
    assert plain % MIB == 0


def test_the_expected_footprint_is_of_the_configured_models(tmp_path: Path) -> None:
    small, large = (byte_model(tmp_path, str(n), vocab_size=n) for n in (300, 40_000))
    rule = {"speculation.rule": "rejection"}
    for model, vocab in ((small, 300), (large, 40_000)):
        config = load(None, rule | {"target.model": str(model), "draft.model": str(model)})
        assert expected_bytes(config) == (shared_bytes(config, vocab, 512), "")
    odd = load(None, rule | {"target.model": str(small), "draft.model": str(large)})
    missing = load(None, rule | {"target.model": "/no/such", "scheduler.max_model_len": 99})
    for config, longest, why in ((odd, 8192, "vocabulary of 40000"), (missing, 99, "/no/such")):
        needed, assumed = expected_bytes(config)
        assert needed == shared_bytes(config, 49_152, longest)
        assert f"a vocabulary of 49152 and requests of {longest} tokens" in assumed
        assert why in assumed


def test_in_ssd_the_target_keeps_its_cores_to_itself() -> None:
    config = load(None, {"mode": "ssd", "target.device": "cpu", "draft.device": "cpu"})
    roles = ("target", "draft", "scheduler", "frontend")
    assert [process_cores(config, r, [2, 5]) for r in roles] == [[2], [5], [5], [5]]
    assert [process_cores(config, r, range(8))[:1] for r in roles] == [[0], [6], [6], [6]]
    alone = load(None, {"mode": "ar", "target.device": "cpu"})
    assert [process_cores(alone, r, [0, 1]) for r in roles] == [[], [], [], []]
    gpu = load(None, {"mode": "ssd", "target.device": "cuda:0", "draft.device": "cuda:1"})
    assert [process_cores(gpu, r, [0, 1]) for r in roles] == [[], [], [], []]


def test_cores_the_user_names_decide() -> None:
    devices = {"target.device": "cpu", "draft.device": "cpu"}
    apart = load(None, {"target.cpus": [1], "draft.cpus": [0], **devices})
    assert process_cores(apart, "target", [0, 1]) == [1]
    assert process_cores(apart, "scheduler", [0, 1]) == [0]
    assert process_cores(apart, "scheduler", [0, 1, 2]) == []  # there is a core to spare
    told = load(None, {"target.cpus": [1], "draft.cpus": [0], "run.cpus": [1], **devices})
    assert process_cores(told, "frontend", [0, 1]) == [1]
