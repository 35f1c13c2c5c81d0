import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_pipe.text.detokenizer import (
    ByteStreamDetokenizer,
    DetokenizerFactory,
    WindowDetokenizer,
    byte_of_char,
)
from tests.text.vocabularies import SPECIALS, byte_fallback, byte_level

MAKERS = pytest.mark.parametrize("make", [byte_level, byte_fallback])


def pieces(tokenizer, ids, cuts, special=False):
    """Texts of pushing ``ids`` cut at ``cuts``, then of finish."""
    detokenizer = DetokenizerFactory(tokenizer).new(special)
    out, start = [], 0
    for end in [*sorted({c for c in cuts if c < len(ids)}), len(ids)]:
        out.append(detokenizer.push(ids[start:end]))
        start = end
    return [*out, detokenizer.finish()]


def test_the_kind_of_decoder_picks_the_implementation():
    assert isinstance(DetokenizerFactory(byte_level()).new(), ByteStreamDetokenizer)
    assert isinstance(DetokenizerFactory(byte_fallback()).new(), WindowDetokenizer)


@MAKERS
@pytest.mark.parametrize("special", [False, True])
@given(data=st.data())
def test_chunks_of_any_ids_concatenate_to_the_full_decode(make, special, data):
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=40))
    assert "".join(pieces(tokenizer, ids, cuts, special)) == tokenizer.decode(ids, special)


@MAKERS
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 60), max_size=60))
def test_no_replacement_character_appears_while_text_streams(make, text, cuts):
    tokenizer = make()
    ids = tokenizer.encode(text)
    full = tokenizer.decode(ids)
    streamed = pieces(tokenizer, ids, cuts)
    assert "".join(streamed) == full
    assert "".join(streamed).count("\ufffd") == full.count("\ufffd") == text.count("\ufffd")


@given(st.lists(st.integers(0, 255), max_size=24), st.lists(st.integers(0, 24), max_size=24))
def test_bytes_that_are_no_text_decode_as_the_tokenizer_decodes_them(raw, cuts):
    for tokenizer, name in ((byte_level(), None), (byte_fallback(), "<0x{:02X}>")):
        if name is None:
            alphabet = {v: k for k, v in byte_of_char().items()}
            ids = [tokenizer.backend.token_to_id(alphabet[b]) for b in raw]
        else:
            ids = [tokenizer.backend.token_to_id(name.format(b)) for b in raw]
        assert "".join(pieces(tokenizer, ids, cuts)) == tokenizer.decode(ids)


def test_an_emoji_waits_for_its_last_byte():
    tokenizer = byte_level()
    ids = [tokenizer.backend.token_to_id(c) for c in "ðŁĻ"]
    detokenizer = DetokenizerFactory(tokenizer).new()
    assert [detokenizer.push([i]) for i in ids] == ["", "", ""]
    assert detokenizer.push([tokenizer.backend.token_to_id("Ĥ")]) == "🙂"
    assert detokenizer.finish() == ""


def test_words_come_out_at_once_and_keep_their_spaces():
    for make in (byte_level, byte_fallback):
        tokenizer = make()
        ids = tokenizer.encode("the quick brown fox")
        detokenizer = DetokenizerFactory(tokenizer).new()
        assert "".join(detokenizer.push([i]) for i in ids) == "the quick brown fox"


def test_special_tokens_have_no_text_and_added_words_do():
    tokenizer = byte_level()
    assert {tokenizer.backend.id_to_token(i) for i in tokenizer.special_ids} == set(SPECIALS)
    own = tokenizer.backend.token_to_id("<own word ü>")
    eos = tokenizer.backend.token_to_id("</s>")
    assert "".join(pieces(tokenizer, [own, eos], [1])) == "<own word ü>"
