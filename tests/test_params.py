"""Parameters as users of other libraries write them become plain ones, or errors by name."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from ssd_pipe.errors import RequestError
from ssd_pipe.params import SamplingParams, checked

HUGE = Fraction(10**400)
LONG = 10**6000  # has more digits than Python writes


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        ("max_tokens", np.uint8(9), 9),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.array(0.5), 0.5),
        ("temperature", Fraction(1, 4), 0.25),
        ("ignore_eos", np.bool_(True), True),
        ("stop_token_ids", (np.int64(3), 4, np.uint8(5)), (3, 4, 5)),
        ("stop_token_ids", np.array([3, 4]), (3, 4)),
        ("stop", [np.str_("a")], ("a",)),
        ("stop", {"a"}, ("a",)),
        ("stop", "ab", ("ab",)),
        ("top_k", -1, 0),
        ("top_k", np.int64(-1), 0),
        ("logit_bias", {np.int32(3): np.float16(-1), 4: Fraction(1, 2)}, {3: -1.0, 4: 0.5}),
    ],
)
def test_what_users_write_is_made_plain(field: str, given: Any, expected: Any) -> None:
    for made in (
        checked(None, {field: given}),
        checked(SamplingParams(**{field: given}), {}),
    ):
        assert getattr(made, field) == expected
        wire = msgspec.msgpack.encode(made)
        assert msgspec.msgpack.decode(wire, type=SamplingParams) == made


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": HUGE},
        {"max_tokens": HUGE},
        {"temperature": 10**400},
        {"seed": LONG},
        {"stop_token_ids": [1, LONG]},
        {"stop_token_ids": [HUGE]},
        {"logit_bias": {1: HUGE}},
        {"logit_bias": {LONG: 1.0}},
    ],
)
def test_numbers_that_nothing_holds_are_refused_by_name(given: dict[str, Any]) -> None:
    [field] = given
    with pytest.raises(RequestError, match=rf"^{field}: Number out of range$") as caught:
        checked(None, given)
    assert (caught.value.code, caught.value.field) == (400, field)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("max_tokens", np.float64(4.0)),
        ("max_tokens", np.bool_(True)),
        ("temperature", np.float64),
        ("top_k", -2),
        ("temperature", np.array([0.5, 1.0])),
        ("stop_token_ids", np.array([0.5])),
        ("logit_bias", {"3": 1.0}),
    ],
)
def test_numbers_of_another_kind_stay_wrong(field: str, given: Any) -> None:
    with pytest.raises(RequestError) as caught:
        checked(None, {field: given})
    assert caught.value.field.partition(".")[0] == field


def test_a_long_value_is_not_repeated_whole() -> None:
    for stop in (["x" * 100_000], ["x"] * 100_000):
        with pytest.raises(RequestError, match=r"^stop: ") as caught:
            checked(None, {"stop": stop})
        assert len(str(caught.value)) < 250


def test_a_format_is_left_as_it_is() -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": {"maxLength": 3}}}
    assert checked(None, {"response_format": wanted}).response_format == wanted
