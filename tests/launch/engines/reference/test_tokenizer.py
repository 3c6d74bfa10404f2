"""Text to tokens and back, in pieces that add up."""

from __future__ import annotations

import pytest

from launch.engines.reference.protocol import ByteTokenizer


def pieces(tokenizer, tokens) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]


@pytest.mark.parametrize("text", ["plain", "äöü €", "日本 🙂 x"])
def test_bytes_round_trip_and_a_character_comes_out_whole(text):
    tokenizer = ByteTokenizer(256)
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert "".join(pieces(tokenizer, tokens)) == text
    assert [piece for piece in pieces(tokenizer, tokens) if piece] == list(text)


def test_ids_without_text_are_replacement_characters_and_end_an_open_character():
    tokenizer = ByteTokenizer(300)
    assert "".join(pieces(tokenizer, [65, 299, 66])) == "A\ufffdB"
    assert "".join(pieces(tokenizer, [0xE2, 0x82, 299])) == "\ufffd\ufffd"
    assert "".join(pieces(tokenizer, [0xE2, 0x82])) == "\ufffd"
    assert "".join(pieces(tokenizer, [0xFF, 65])) == "\ufffdA"


def test_text_needs_a_vocabulary_of_bytes_and_valid_unicode():
    with pytest.raises(ValueError, match="send token ids"):
        ByteTokenizer(255).encode("x")
    with pytest.raises(ValueError, match="not valid Unicode"):
        ByteTokenizer(256).encode("\ud800")
