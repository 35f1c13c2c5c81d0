"""Records of leased rounds: whole or not there, and what followers answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ipc import round_records as rr
from ipc.round_records import RoundRecords
from ssd_pipe.errors import ConfigError, ResourceError

SLOTS, K = 3, 4


def write(records: RoundRecords, number: int, row: int, **words: int) -> None:
    line = records.records[number % rr.ROUNDS, row]
    for name, value in words.items():
        line[getattr(rr, name.upper())] = value
    line[rr.NUMBER] = number


def test_a_round_is_there_once_all_its_rows_are(tmp_path: Path) -> None:
    made = RoundRecords.create(tmp_path / "records", SLOTS, K)
    seen = RoundRecords.open(tmp_path / "records", SLOTS, K)
    write(made, 5, 0, accepted=1, token=9, chain=2, entry=3, ready=3, room=4, flags=rr.FINISHED)
    head = rr.RECORD_HEAD
    made.records[5, 0, head : head + 2] = [7, 8]
    made.records[5, 0, head + K : head + K + 3] = [1, 2, 3]
    assert seen.round(5, 2) is None
    write(made, 5, 1, flags=rr.IDLE, chain=0, ready=0)
    assert seen.round(5, 3) is None
    found = seen.round(5, 2)
    assert found is not None
    first, second = found
    assert first[:7] == (1, 9, [7, 8], 3, [1, 2, 3], 4, rr.FINISHED)
    assert first.finished
    assert not first.idle
    assert second.idle
    assert second.finished
    assert seen.round(5 + rr.ROUNDS, 2) is None


@pytest.mark.parametrize("length", [-1, K + 1, 2**40])
def test_lengths_that_cannot_be_are_cut(tmp_path: Path, length: int) -> None:
    records = RoundRecords.create(tmp_path / "records", SLOTS, K)
    write(records, 1, 0, chain=length, ready=length)
    found = records.round(1, 1)
    assert found is not None
    assert len(found[0].chain) == len(found[0].next) == (0 if length < 0 else K)


def test_followers_and_their_words(tmp_path: Path) -> None:
    records = RoundRecords.create(tmp_path / "records", SLOTS, K)
    other = RoundRecords.open(tmp_path / "records", SLOTS, K)
    records.read(rr.FOLLOWED, 8)
    records.read(rr.DRAFTED, 6)
    assert (other.progress(rr.FOLLOWED), other.progress(rr.DRAFTED)) == (8, 6)
    other.recall(33)
    assert records.recalled == 33
    records.clock_ns = -(2**62)
    assert other.clock_ns == -(2**62)
    assert not other.aborted
    records.abort()
    assert other.aborted
    records.answer(2, 7, [4, 5])
    records.skip(1, 9)
    assert other.mail[2, [rr.ANSWER, rr.LENGTH]].tolist() == [7, 2]
    assert other.mail[2, rr.MAIL_HEAD : rr.MAIL_HEAD + 2].tolist() == [4, 5]
    assert other.mail[1, rr.SKIP] == 9
    assert not other.mail[0].any()


def test_parts_do_not_overlap() -> None:
    records = RoundRecords(np.zeros(RoundRecords.size_bytes(SLOTS, K), np.uint8), SLOTS, K)
    for part in (records.control, records.mail, records.records):
        np.add(part, 1, out=part)
    assert (records.words == 1).all()
    assert records.mail.strides[0] % 64 == records.records.strides[1] % 64 == 0


def test_another_shape_is_refused(tmp_path: Path) -> None:
    RoundRecords.create(tmp_path / "records", SLOTS, K)
    with pytest.raises(ResourceError, match="expected"):
        RoundRecords.open(tmp_path / "records", SLOTS + 1, K)
    with pytest.raises(ConfigError, match="bytes needed"):
        RoundRecords(np.zeros(64, np.uint8), SLOTS, K)
