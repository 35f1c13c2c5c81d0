from hypothesis import given
from hypothesis import strategies as st

from ssd_pipe.text.answer import AnswerText
from ssd_pipe.text.detokenizer import DetokenizerFactory
from ssd_pipe.text.stops import StopMatcher
from tests.text.vocabularies import byte_level

TEXTS = st.text("ab\n", max_size=40)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def reference(text, stops):
    """The text before the stop that is complete first, found by growing the text."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


def run(text, stops, cuts):
    matcher, shown, at = StopMatcher(stops), "", 0
    for cut in [*sorted(c for c in cuts if c <= len(text)), len(text)]:
        emit, stopped = matcher.push(text[at:cut])
        shown, at = shown + emit, cut
        assert stopped == (matcher.stopped is not None)
    return shown + matcher.finish(), matcher.stopped is not None


@given(TEXTS, STOPS, st.lists(st.integers(0, 40), max_size=40))
def test_any_cutting_gives_the_text_before_the_first_complete_stop(text, stops, cuts):
    assert run(text, stops, cuts) == reference(text, stops)


@given(TEXTS, STOPS, st.lists(st.integers(0, 40), max_size=40))
def test_only_what_may_begin_a_stop_is_held_back(text, stops, cuts):
    matcher, shown, at = StopMatcher(stops), "", 0
    for cut in sorted(c for c in cuts if c <= len(text)):
        emit, stopped = matcher.push(text[at:cut])
        shown, at = shown + emit, cut
        if stopped:
            return
        held = text[len(shown) : at]
        assert not held or any(len(s) > len(held) and s.startswith(held) for s in stops)


def test_a_stop_ends_before_itself_across_pushes():
    matcher = StopMatcher(["\n\nHuman"])
    assert matcher.push("yes\n") == ("yes", False)
    assert matcher.push("\nHum") == ("", False)
    assert matcher.push("an: more") == ("", True)
    assert matcher.push("even more") == ("", True)
    assert matcher.finish() == ""


def test_the_longest_of_two_that_end_together_wins():
    assert StopMatcher(["bc", "abc"]).push("xabc") == ("x", True)


def test_text_that_only_looked_like_a_stop_is_given_out():
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.push("tity") == ("ENtity", False)


@given(
    st.text(max_size=30),
    st.lists(st.text(min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(1, 6), min_size=1, max_size=30),
)
def test_the_token_that_completes_the_stop_is_the_last_one(text, stops, sizes):
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    answer = AnswerText(DetokenizerFactory(tokenizer).new(), stops)
    shown, used, stopped, at = "", 0, False, 0
    for size in sizes * 120:  # 4 tokens a character at most
        if stopped or at >= len(ids):
            break
        piece = answer.push(ids[at : at + size])
        shown, used, stopped, at = shown + piece.text, used + piece.used, piece.stopped, at + size
    if not stopped:
        rest = answer.finish()
        shown, stopped = shown + rest.text, rest.stopped
    expected, found = reference(tokenizer.decode(ids), stops)
    assert (shown, stopped) == (expected, found)
    if found:
        enough = next(
            n for n in range(len(ids) + 1) if reference(tokenizer.decode(ids[:n]), stops)[1]
        )
        # the decode of half a character shows U+FFFD, which the stream never does
        assert used >= enough or any("\ufffd" in s for s in stops)
        assert reference(tokenizer.decode(ids[:used]), stops) == (expected, True)
    else:
        assert used == len(ids)


@given(
    st.text("abc", max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 6),
    st.booleans(),
)
def test_a_stop_text_counts_from_the_first_watched_character_on(text, stops, blind, included):
    """By definition: the first end, past the blind characters, of any stop text."""
    matcher = StopMatcher(stops, included)
    shown, stopped = "", False
    for at, character in enumerate(text, start=1):
        piece, stopped = matcher.push(character, at > blind)
        shown += piece
        if stopped:
            break
    ends = [
        (end, end - len(stop))
        for end in range(blind + 1, len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    if not ends:
        assert (shown + matcher.finish(), stopped) == (text, False)
        return
    end, start = min(ends)
    assert (shown, stopped) == (text[: end if included else start], True)
