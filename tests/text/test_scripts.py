"""Text of any script, through the tokenizer of the project's own pair, in chunks of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_pipe.errors import ModelError
from ssd_pipe.hub import TARGET_NAME, resolve
from ssd_pipe.text.answer import AnswerText
from ssd_pipe.text.detokenizer import DetokenizerFactory
from ssd_pipe.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_fallback, byte_level

SAMPLES = {
    "latin": "Façade naïve — “Übermut” ﬁn, Łódź, İstanbul, cafe\u0301 e\u0323\u0302",
    "greek": "Ελληνικά: ὀρθογραφία",
    "cyrillic": "Съешь ещё этих мягких",
    "hebrew": "שָׁלוֹם עוֹלָם\u200f!",
    "arabic": "اَلسَّلامُ عَلَيْكُم ﷺ ١٢٣",
    "devanagari": "नमस्ते क्षत्रिय श्री",
    "bengali": "বাংলা ভাষা",
    "tamil": "வணக்கம் நிக்ஷே",
    "thai": "ภาษาไทย กำลัง",
    "burmese": "မြန်မာဘာသာ",
    "khmer": "ភាសាខ្មែរ",
    "tibetan": "བོད་སྐད།",
    "ethiopic": "አማርኛ ፊደል",
    "georgian": "ქართული ᲥᲐᲠᲗᲣᲚᲘ",
    "han": "你好，世界。繁體字 𠮷𠀋 㐂",
    "japanese": "こんにちは カタカナ ｶﾅ か\u3099",
    "korean": "안녕하세요 \u1112\u1161\u11ab",
    "cuneiform": "𒀀𒁀 𓀀𓂀 𐍈",
    "mathematics": "𝔘𝕟𝕚𝖈𝓸𝒹𝔢 ∮∇⋅𝐄 ≈ ⅓",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵🇨🇿 👍🏽 ☕️ 1️⃣ 🧑🏿‍🚀",
    "invisible": "a\u200bb\u200dc\u2066d\u2069\ufeff\u00ad\u2028\u0085\t\r\n\u0000\u007f",
    "private": "\ue000\U000f0000\U0010ffff\ufffe\ufffd",
}
CHARACTERS = sorted({c for text in SAMPLES.values() for c in text})
PIECES = st.one_of(
    st.sampled_from(list(SAMPLES.values())),
    st.text(st.sampled_from(CHARACTERS), max_size=12),
    st.text(max_size=8),  # any character there is
)
TEXTS = st.lists(PIECES, max_size=5).map("".join)
CUTS = st.lists(st.integers(1, 6), max_size=60)


@pytest.fixture(scope="module", params=["smollm2", "byte-level", "byte-fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "byte-level":
        return byte_level()
    if request.param == "byte-fallback":
        return byte_fallback()
    try:
        return Tokenizer.load(resolve(TARGET_NAME))
    except ModelError as error:
        pytest.skip(str(error))


def chunks(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Texts of the ids in chunks of these sizes, single tokens where there is no size."""
    detokenizer = DetokenizerFactory(tokenizer).new()
    out, at, left = [], 0, list(sizes)
    while at < len(ids):
        size = left.pop(0) if left else 1
        out.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*out, detokenizer.finish()]


@given(text=TEXTS, sizes=CUTS)
def test_text_of_any_script_comes_whole(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    """A chunk that ends inside a character waits for its rest: each is valid Unicode, and what
    they say together is what decoding all at once says."""
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    streamed = chunks(tokenizer, ids, sizes)
    assert "".join(streamed) == whole
    rest = whole
    for chunk in streamed:
        assert rest.startswith(chunk)
        rest = rest[len(chunk) :]
        chunk.encode()


@pytest.mark.parametrize("script", SAMPLES)
def test_no_character_is_lost_or_replaced(tokenizer: Tokenizer, script: str) -> None:
    text = SAMPLES[script]
    ids = tokenizer.encode(text)
    for size in (1, 2, 3):
        shown = "".join(chunks(tokenizer, ids, [size] * len(ids)))
        assert shown == tokenizer.decode(ids)
        assert shown.count("\ufffd") == text.count("\ufffd")
        if tokenizer.backend.normalizer is None:
            assert shown == text


@given(text=TEXTS | st.text(st.characters(max_codepoint=0x20)))
def test_a_text_is_never_fewer_tokens_than_foreseen(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, rendered=True))


def test_the_foresight_is_of_use(tokenizer: Tokenizer) -> None:
    few = tokenizer.least_tokens("xyz " * 10_000)
    assert few > 100 or tokenizer.backend.normalizer is not None


@given(data=st.data(), sizes=CUTS)
def test_tokens_in_any_order_stream_as_they_decode(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int]
) -> None:
    """What a hot model may emit: bytes that are no text, special tokens, halves of characters."""
    pieces = st.one_of(
        st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8),
        TEXTS.map(lambda text: tokenizer.encode(text)[:9]),
    )
    ids = [t for part in data.draw(st.lists(pieces, max_size=5)) for t in part]
    assert "".join(chunks(tokenizer, ids, sizes)) == tokenizer.decode(ids)


@given(text=TEXTS, data=st.data(), sizes=CUTS)
def test_a_stop_text_of_any_script_is_never_shown(
    tokenizer: Tokenizer, text: str, data: st.DataObject, sizes: list[int]
) -> None:
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    if not whole:
        return
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 4))]
    answer = AnswerText(DetokenizerFactory(tokenizer).new(), (stop,))
    shown, at, left = "", 0, list(sizes)
    stopped = False
    while at < len(ids) and not stopped:
        size = left.pop(0) if left else 1
        piece = answer.push(ids[at : at + size])
        shown += piece.text
        stopped = piece.stopped
        at += size
    if not stopped:
        piece = answer.finish()
        shown += piece.text
        stopped = piece.stopped
    assert stopped
    assert shown == whole[: whole.index(stop)]
