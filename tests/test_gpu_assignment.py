from __future__ import annotations

import pytest

from ssd_pipe.config import Mode, PipelineConfig, config_from_mapping
from ssd_pipe.errors import ConfigError
from ssd_pipe.gpu_assignment import assign, physical_gpu, sharers


def config(
    tp: int = 1, mode: Mode = "ssd", target: str = "auto", draft: str = "auto"
) -> PipelineConfig:
    return config_from_mapping(
        {"mode": mode, "target": {"tp": tp, "device": target}, "draft": {"device": draft}}
    )


@pytest.mark.parametrize(
    ("wanted", "count", "expected"),
    [
        (config(), 1, {"target-0": 0, "draft": 0}),
        (config(), 2, {"target-0": 0, "draft": 1}),
        (config(mode="ar"), 2, {"target-0": 0}),
        (config(tp=2), 2, {"target-0": 0, "target-1": 1, "draft": 0}),
        (config(tp=2), 3, {"target-0": 0, "target-1": 1, "draft": 2}),
        (config(tp=4), 5, {f"target-{r}": r for r in range(4)} | {"draft": 4}),
        (config(tp=2, draft="cuda:1"), 2, {"target-0": 0, "target-1": 1, "draft": 1}),
        (config(target="cuda:1", draft="cuda:0"), 2, {"target-0": 1, "draft": 0}),
        (config(target="cpu"), 2, {"draft": 1}),
        (config(tp=4, target="cpu", draft="cpu"), 1, {}),
    ],
)
def test_ranks_take_the_first_gpus_and_the_draft_the_next(
    wanted: PipelineConfig, count: int, expected: dict[str, int]
) -> None:
    assert assign(wanted, count) == expected


def test_more_ranks_than_gpus_are_refused_unless_each_is_given_its_own() -> None:
    for count in (1, 2):
        with pytest.raises(
            ConfigError, match=rf"target\.tp: 3 ranks need as many GPUs, not {count}"
        ):
            assign(config(tp=3), count)
    with pytest.raises(ConfigError, match=r"target\.tp"):
        assign(config(tp=3), 2, restricted=True)
    given = assign(config(tp=3), 1, restricted=True)
    assert given == {"target-0": 0, "target-1": 0, "target-2": 0, "draft": 0}


def test_a_gpus_memory_is_divided_by_those_who_share_it() -> None:
    assert sharers(config(), "draft", 1) == 2
    assert sharers(config(tp=2), "target-0", 2) == 2
    assert sharers(config(tp=2), "target-1", 2) == 1
    assert sharers(config(tp=2), "draft", 3) == 1


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (None, ["0", "1"]),
        ("3,1", ["3", "1"]),
        (" 3 , 1 ", ["3", "1"]),
        ("GPU-8f2e,GPU-11aa", ["GPU-8f2e", "GPU-11aa"]),
        ("MIG-1f", ["MIG-1f", "1"]),
    ],
)
def test_visible_devices_name_the_machines_gpus(listed: str | None, names: list[str]) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [physical_gpu(i, environment) for i in range(2)] == names
