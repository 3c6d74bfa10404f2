"""Text to token ids and back: a folder's own tokenizer, or bytes if there is none."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from pd_cache.errors import UnsupportedModelError

_REPLACEMENT = "\ufffd"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_MOST_UNDECIDED = 8


class Detokenizer(ABC):
    """Turns one request's output into text, piece by piece; the pieces together are the whole text."""

    @abstractmethod
    def push(self, token: int) -> str:
        """Returns the text that is certain after `token`; may be empty in the middle of a character."""

    @abstractmethod
    def finish(self) -> str:
        """Returns the text that is left when no more tokens come."""


class Tokenizer(ABC):
    """Turns text into token ids and back. Thread-safe."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text`. Raises ValueError for text that this tokenizer cannot handle."""

    @abstractmethod
    def detokenizer(self) -> Detokenizer:
        """Returns a new detokenizer, for one request."""


def open_tokenizer(folder: str | None, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer of a model's folder, or the byte-level one if it has none or there is no folder.

    Raises UnsupportedModelError for tokenizer files that cannot be read.
    """
    if folder is not None and any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        return FolderTokenizer(folder)
    return ByteTokenizer(vocab_size)


class ByteTokenizer(Tokenizer):
    """A text's UTF-8 bytes are its token ids. Ids from 256 on have no text and come out as U+FFFD."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        if self._vocab_size < 256:
            raise ValueError(
                f"this model has no tokenizer, and its vocabulary of {self._vocab_size} has no room for bytes; "
                "send token ids"
            )
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error.reason} at {error.start}") from None

    def detokenizer(self) -> Detokenizer:
        return _ByteDetokenizer()


class _ByteDetokenizer(Detokenizer):
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        if token < 256:
            return self._decoder.decode(bytes((token,)))
        return self.finish() + _REPLACEMENT

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class FolderTokenizer(Tokenizer):
    """The tokenizer whose files lie in a model's folder; special tokens have no text."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the exceptions of tokenizers for bad files have no common root
            raise UnsupportedModelError(
                f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}"
            ) from error

    def encode(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer(text)["input_ids"])
        except (UnicodeError, TypeError) as error:
            raise ValueError(f"the text cannot be tokenized: {error}") from None

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def detokenizer(self) -> Detokenizer:
        return _FolderDetokenizer(self)


class _FolderDetokenizer(Detokenizer):
    """Decodes the last few tokens together with those before them, since a token's text depends on its neighbours.

    Text that ends in U+FFFD may be a character whose other bytes are still to come: it is held back, for a few tokens.
    """

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._undecided: list[int] = []

    def push(self, token: int) -> str:
        self._undecided.append(token)
        text = self._pending()
        if text.endswith(_REPLACEMENT) and len(self._undecided) < _MOST_UNDECIDED:
            return ""
        if text:
            self._before, self._undecided = self._undecided, []
        elif len(self._undecided) >= _MOST_UNDECIDED:
            self._undecided = self._undecided[-1:]
        return text

    def finish(self) -> str:
        text = self._pending()
        self._before, self._undecided = [], []
        return text

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._undecided)[len(known) :]
