"""The paper's run: what it would run on which machine, its arithmetic, and a dry run on CPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.paper_load import Wave, rate
from bench.paper_plan import arguments, cases, config_of
from bench.paper_run import main
from bench.paper_stages import read_batch
from bench.published import PUBLISHED
from ssd_pipe.engine.pacing import expected_tokens
from ssd_pipe.errors import ConfigError

ROUNDS = [{"accepted": a, "hit": a != 1, "chain": 3} for a in (3, 1, 0, 3, 2, 3)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps({"k": 3, "pair": "a / b", "temperature": 0, "rounds": ROUNDS}))
    return path


@pytest.mark.parametrize("pair", PUBLISHED)
def test_the_acceptance_of_a_pair_gives_its_published_throughput(pair: str) -> None:
    p = PUBLISHED[pair]
    tokens = expected_tokens(p.acceptance, p.k)
    drafted = 1 + p.draft_share
    assert tokens / drafted == pytest.approx(p.sd / p.ar, rel=1e-6)
    hits = p.hit_rate
    assert tokens / (hits + (1 - hits) * drafted) == pytest.approx(p.ssd / p.ar, rel=1e-6)
    assert 0.6 < p.acceptance < 0.9


@pytest.mark.parametrize(
    ("gpus", "layouts"),
    [
        (8, ["4", "4", "4+1", "4+2", "4+4"]),
        (5, ["4", "4", "4+1"]),
        (4, ["2", "2", "2+1", "2+2"]),
        (2, ["1", "1+1", "1+1"]),
        (1, ["1", "1", "1"]),
    ],
)
def test_engines_are_laid_out_on_the_gpus_there_are(gpus: int, layouts: list[str]) -> None:
    args = arguments(["--gpus", str(gpus), "--pairs", "qwen32b"])
    planned = cases(args)
    assert [case.layout for case in planned] == layouts
    assert [case.engine for case in planned] == ["ar", "sd", *["ssd"] * (len(layouts) - 2)]
    for case in planned:
        config = config_of(case, args)
        assert config.target.tp == case.tp
        assert config.draft_workers == case.drafts
        assert config.scheduler.max_num_seqs == 16
        assert bool(config.speculation.synthetic_acceptance) == (case.engine != "ar")
    assert len({case.name for case in planned}) == len(planned)


def test_every_source_k_and_draft_count_is_a_case(trace: Path) -> None:
    given = ["--gpus", "8", "--pairs", "llama70b", "--k-ssd", "5", "7", "--trace", str(trace)]
    planned = cases(arguments([*given, "--engines", "ssd", "--drafts", "1", "4"]))
    assert [(c.source, c.k, c.drafts) for c in planned] == [
        (source, k, drafts)
        for source in ("published", "recorded")
        for k in (5, 7)
        for drafts in (1, 4)
    ]
    assert [c.acceptance.setting for c in planned if c.acceptance] == ["0.87"] * 4 + [
        str(trace)
    ] * 4


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--gpus", "2", "--tp", "4"], "2 GPUs are too few for a target of 4 ranks"),
        (["--batches", "0"], "must be at least 1"),
        (["--no-published"], "needs a --trace"),
    ],
)
def test_what_does_not_fit_is_refused(given: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        arguments(given)


def test_the_rate_is_that_of_the_time_in_which_all_rows_decode() -> None:
    wave = Wave(
        arrivals=[
            [(0.0, 1), (1.0, 3), (2.0, 4), (3.0, 2)],
            [(1.0, 1), (1.5, 2), (2.5, 5)],
        ]
    )
    assert wave.window == (1.0, 2.5)
    assert wave.tokens == 4 + 2 + 5
    assert rate([wave, wave]) == pytest.approx(11 / 1.5)
    apart = Wave(arrivals=[[(0.0, 1), (1.0, 1)], [(2.0, 1), (3.0, 1)]])
    assert rate([apart]) is None


def log(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")


def test_stages_are_those_of_the_window_and_the_batch(tmp_path: Path) -> None:
    ms = 1_000_000
    verify = [{"event": "verify", "start": t, "end": t + 4 * ms, "rows": 2} for t in (0, 10 * ms)]
    odd = [{"event": "verify", "start": 11 * ms, "end": 99 * ms, "rows": 3}]
    late = [{"event": "verify", "start": 9000 * ms, "end": 9999 * ms, "rows": 2}]
    log(tmp_path / "target-0.jsonl", [*verify, *odd, *late])
    rows = [{"k": 3, "hit": True}, {"k": 1, "hit": False}]
    log(
        tmp_path / "scheduler.jsonl",
        [
            {"event": "round", "plan": 4, "start": 0, "rows": rows},
            {"event": "round", "plan": 5, "start": 10 * ms, "rows": rows},
            {"event": "round", "plan": 6, "start": 20 * ms, "rows": rows[:1]},
        ],
    )
    draft = {"event": "draft", "cut": False}
    for worker, slower in enumerate((0, 1)):
        whole = {
            "round": 4,
            "start": 0,
            "backup": 0,
            "glue": ms,
            "depths": [3 * ms, (5 + slower) * ms],
        }
        made = {"round": 5, "start": 9 * ms, "backup": 11 * ms, "glue": 12 * ms}
        made |= {"depths": [14 * ms]}
        other = whole | {"round": 6, "backup": 7 * ms, "glue": 9 * ms}
        rounds = [draft | whole, draft | other, *([draft | made] if worker == 0 else [])]
        log(tmp_path / f"draft-{worker}.jsonl", rounds)
    stages = read_batch(tmp_path, [(0.0, 1.0)], 2)
    assert (stages.rounds, stages.tokens_per_row, stages.hit_rate) == (2, 3.0, 0.5)
    assert (stages.verify_ms, stages.backup_ms, stages.backup_share) == (4.0, 2.0, 0.5)
    assert (stages.glue_ms, stages.step_ms, stages.tree_ms) == (1.0, 2.0, 6.0)
    # Half of the rounds take the slower worker's tree, the others their backup and verification.
    assert stages.bound(2) == pytest.approx(1e3 * 2 * 3 / ((6 + 4 + 2) / 2))


def test_a_dry_run_on_cpus_gives_every_figure_and_goes_on_where_it_ended(
    tmp_path: Path, shm_dir: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "paper.json"
    given = [
        *("--device", "cpu", "--pairs", "tiny", "--gpus", "3", "--tp", "1", "--drafts", "2"),
        *("--batches", "1", "3", "--tokens", "48", "--prompt-tokens", "10", "--waves", "1"),
        *("--trace", str(trace), "--no-published", "--output", str(output), "--resume"),
        *("--shm-dir", str(shm_dir), "--log-dir", str(tmp_path / "logs")),
    ]
    assert main([*given, "--engines", "ar", "ssd"]) == 0
    first = json.loads(output.read_text())
    assert [(c["case"]["engine"], c["batch"]) for c in first["cells"]] == [
        ("ar", 1),
        ("ar", 3),
        ("ssd", 1),
        ("ssd", 3),
    ]
    assert main([*given, "--engines", "ar", "sd", "ssd"]) == 0
    content = json.loads(output.read_text())
    assert content["cells"][:4] == first["cells"]
    assert [c["case"]["engine"] for c in content["cells"][4:]] == ["sd", "sd"]
    for cell in content["cells"]:
        engine, stages = cell["case"]["engine"], cell["stages"]
        assert cell["tok_s"] > 0
        assert cell["roofline"] > 0
        assert cell["theorem7"] > 0
        assert stages["rounds"] > 2
        assert stages["verify_ms"] > 0
        assert (stages["tokens_per_row"] == 1) == (engine == "ar")
        assert (stages["hit_rate"] is not None) == (engine == "ssd")
        if engine == "sd":
            assert stages["backup_share"] == 1
    shown = capsys.readouterr().out
    assert "SYNTHETIC ACCEPTANCE: trace of a / b, T=0, K=3, 6 rounds" in shown
    assert "1+2" in shown
    assert not list(shm_dir.glob("*/*"))
