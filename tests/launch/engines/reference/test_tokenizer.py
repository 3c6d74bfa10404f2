"""Text to tokens and back, in pieces that add up."""

from __future__ import annotations

import json

import pytest

from launch.engines.reference.tokenizer import ByteTokenizer, FolderTokenizer, open_tokenizer
from pd_cache.errors import UnsupportedModelError


def pieces(tokenizer, tokens) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE without merges, as a model's folder has it: a character may take several tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{letter: index + 1 for index, letter in enumerate(alphabet)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(path)


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


@pytest.mark.parametrize("text", ["plain words", "äöü €", "日本 🙂 x"])
def test_a_folders_tokenizer_is_used_and_its_pieces_add_up(text, folder):
    tokenizer = open_tokenizer(folder, 300)
    assert isinstance(tokenizer, FolderTokenizer)
    tokens = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, tokens)) == text
    assert "\ufffd" not in "".join(pieces(tokenizer, tokens))


def test_special_tokens_have_no_text(folder):
    tokenizer = open_tokenizer(folder, 300)
    tokens = tokenizer.encode("ab")
    assert "".join(pieces(tokenizer, [*tokens, 0])) == "ab"


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever(folder):
    tokenizer = open_tokenizer(folder, 300)
    lead = tokenizer.encode("€")[0]
    output = pieces(tokenizer, [lead] * 40)
    assert any(output[:-1])
    assert set("".join(output)) == {"\ufffd"}


def test_text_that_is_not_unicode_is_refused_by_a_folders_tokenizer(folder):
    with pytest.raises(ValueError, match="cannot be tokenized"):
        open_tokenizer(folder, 300).encode("\ud800")


def test_no_folder_or_one_without_tokenizer_files_means_bytes(tmp_path):
    assert isinstance(open_tokenizer(None, 300), ByteTokenizer)
    assert isinstance(open_tokenizer(str(tmp_path), 300), ByteTokenizer)


def test_broken_tokenizer_files_are_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        open_tokenizer(str(tmp_path), 300)
