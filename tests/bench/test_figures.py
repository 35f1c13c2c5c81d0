"""The arithmetic of the benchmark, on answers with known times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import bandwidth, figures
from bench.bandwidth import Bandwidth
from bench.compare import Sample
from bench.engines import Answer
from bench.exactness import first_difference
from bench.rows import Row, add_comparisons, make_row


def answer(started: float, *arrivals: tuple[float, int]) -> Answer:
    count = sum(n for _, n in arrivals)
    return Answer(started=started, arrivals=list(arrivals), tokens=[7] * count, finish="length")


def test_the_first_piece_counts_neither_as_tokens_nor_as_time() -> None:
    a = answer(10.0, (11.0, 4), (11.5, 3), (12.0, 1))
    assert figures.decode_tokens(a) == 4
    assert figures.decode_seconds(a) == 1.0
    assert figures.decode_rounds(a) == 2
    assert figures.decode_rate([a, answer(0.0, (1.0, 1), (2.0, 2))]) == 6 / 2
    assert figures.token_gaps(a) == pytest.approx([0.5 / 3] * 3 + [0.5])


def test_an_answer_in_one_piece_has_no_rate() -> None:
    assert figures.decode_rate([answer(0.0, (1.0, 5))]) is None
    assert figures.decode_rate([answer(0.0)]) is None


def test_counters_are_differences_and_new_names_count_from_zero() -> None:
    gone = figures.difference({"a": 5.0, "b": 2.0}, {"a": 3.0})
    assert gone == {"a": 2.0, "b": 2.0}
    assert figures.total([gone, {"a": 1.0}]) == {"a": 3.0, "b": 2.0}


def test_indexed_counters_keep_their_order_beyond_nine() -> None:
    counters = {f"hits_at_{i}": float(i) for i in reversed(range(12))} | {"hits_at": 99.0}
    assert figures.indexed(counters, "hits_at") == [float(i) for i in range(12)]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8))
def test_acceptance_by_position_multiplies_to_the_survival(counts: list[int]) -> None:
    judged = [sum(counts[j:]) for j in range(len(counts) - 1)]  # no chain was cut short
    chain = figures.acceptance_by_position(counts, judged)
    survival = 1.0
    for j, accepted in enumerate(chain):
        if accepted is None:
            assert not sum(counts[j:])
            return
        survival *= accepted
        assert survival * sum(counts) == pytest.approx(sum(counts[j + 1 :]))


def test_a_chain_that_ended_is_no_refusal() -> None:
    # Ten rounds: six chains of one token, all accepted, and four of two, one of them in full.
    assert figures.acceptance_by_position([0, 9, 1], [10, 4]) == [1.0, 0.25]


def test_a_histogram_gives_its_median_within_a_bin() -> None:
    assert figures.histogram_median([0, 2, 2, 0], 0.5) == pytest.approx(1.0)
    assert figures.histogram_median([1, 0, 4, 1], 1.0) == pytest.approx(2.5)
    assert figures.histogram_median([0, 0], 1.0) is None


def test_shares_of_nothing_are_none() -> None:
    assert figures.shares([3, 0], [1, 0]) == [0.75, None]
    assert figures.median([]) is None
    assert figures.percentile([], 50) is None


def test_pairs_need_both_sides() -> None:
    ours = {("p", 0): 30.0, ("q", 0): 10.0}
    assert figures.paired_ratios(ours, {("p", 0): 20.0}) == [1.5]


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_first_difference(a: list[int], b: list[int]) -> None:
    position = first_difference(a, b)
    if position is None:
        assert a == b
    else:
        assert a[:position] == b[:position]
        assert a[position : position + 1] != b[position : position + 1]


def sample(engine: str, repeat: int, rate: float, **counters: float) -> Sample:
    """Ten tokens after the first at ``rate`` a second, two a piece."""
    arrivals = [(1.0, 1), *((1.0 + 2 * i / rate, 2) for i in range(1, 6))]
    return Sample(
        engine=engine,
        prompt="p",
        repeat=repeat,
        answer=answer(0.5, *arrivals),
        counters=counters,
    )


def rows_of(samples: list[Sample]) -> dict[str, Row]:
    names = dict.fromkeys(s.engine for s in samples)
    rows = [make_row([s for s in samples if s.engine == n], 0, None) for n in names]
    add_comparisons(rows, samples, ["ar", "sd"])
    return {row.engine: row for row in rows}


def test_speed_ups_compare_repeats_that_ran_side_by_side() -> None:
    # The machine was three times slower in the second repeat, for both engines alike.
    speeds = [(20.0, 30.0), (6.0, 10.0), (20.0, 32.0)]
    samples = []
    for repeat, (ar, ssd) in enumerate(speeds):
        samples += [sample("ar", repeat, ar), sample("ssd", repeat, ssd)]
    rows = rows_of(samples)
    assert rows["ar"].tok_s == pytest.approx(20.0)
    assert rows["ssd"].speedup == {"ar": pytest.approx(1.6)}
    assert rows["ssd"].paired["ar"][1] == pytest.approx(1.6)
    assert rows["ssd"].same_tokens == 1.0
    assert rows["ar"].ttft == pytest.approx(500.0)


def test_a_row_shows_weights_read_against_bandwidth() -> None:
    row = make_row([sample("ar", 0, 20.0)], 10**9, Bandwidth(threads=1, copy=40e9, read=20e9))
    assert row.mb_per_token == pytest.approx(500.0)  # two tokens a step
    assert row.gb_s == pytest.approx(10.0)
    assert row.copy_share == pytest.approx(0.25)
    assert row.read_share == pytest.approx(0.5)


def test_draft_time_is_hidden_unless_the_target_waited_for_it() -> None:
    counters = {
        "overhead_seconds": 0.004,
        "overhead_rounds": 4,
        "overhead_at_0": 0,
        "overhead_at_1": 4,
        "verify_seconds": 1.0,
        "forward_seconds": 0.9,
        "steps": 10,
        "rounds": 5,
        "accepted": 15,
        "hits": 3,
        "misses": 1,
        "backup_wait_seconds": 0.02,
        "depth_wait_seconds": 0.03,
        "draft_busy_seconds": 0.4,
        **{f"accepted_at_{i}": n for i, n in enumerate((1, 0, 4))},
        **{f"judged_at_{i}": n for i, n in enumerate((5, 4, 0))},
        **{f"hits_at_{i}": n for i, n in enumerate((0, 0, 3))},
        **{f"misses_at_{i}": n for i, n in enumerate((1, 0, 0))},
    }
    row = make_row([sample("ssd", 0, 20.0, **counters)], 0, None)
    assert row.overhead == pytest.approx(1.0)
    assert row.overhead_median == pytest.approx(0.15)
    assert row.judge == pytest.approx(10.0)
    assert row.accepted_mean == 3
    assert row.acceptance == [0.8, 1.0]
    assert row.hit_rate == 0.75
    assert row.hit_rate_by_k == [0.0, None, 1.0]
    assert row.draft_busy == pytest.approx(80.0)  # a step of the target, of which there were 5
    assert row.draft_exposed == pytest.approx(10.0)
    assert row.draft_hidden == pytest.approx(70.0)


def test_bandwidth_is_that_of_memory_and_not_of_nothing() -> None:
    measured = bandwidth.measure(threads=2, size=8 << 20, rounds=2)
    assert measured.threads == 2
    assert 1e8 < measured.copy < 1e13
    assert 1e8 < measured.read < 1e13
