"""Which node has seen the beginning of a prompt before. Pure.

The proxy has no tokenizer and needs none: the same bytes make the same tokens. So a prompt is cut into blocks of its JSON text, and each
block is named by a hash over everything up to its end. If two clients spell the same prompt differently, it is merely not recognized.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

_BLOCK_BYTES = 2048
"""About 350 token ids, or 500 tokens of text."""
_BYTES_A_TOKEN = 4
"""Roughly, for text; token ids are counted."""
_LEAST_BLOCK_TOKENS = 64
"""The least that a block counts, so that the size of an index is bounded whatever prompts look like."""


class RoutedPrompt(NamedTuple):
    """What routing knows of a prompt."""

    tokens: int
    """The prompt's length: counted if it is token ids, otherwise estimated."""
    blocks: Sequence[Hashable] = ()
    """Names of its blocks; each stands for everything up to its end."""
    block_tokens: float = _LEAST_BLOCK_TOKENS
    """Tokens per block."""


def read_prompt(text: bytes, isolation: bytes = b"") -> RoutedPrompt:
    """Returns what routing needs of the prompt whose JSON is `text`. Prompts of different `isolation` (model, salt) share nothing."""
    tokens = count_tokens(text)
    digest = hashlib.blake2b(isolation, digest_size=8)
    digest.update(len(isolation).to_bytes(8, "little"))
    blocks = []
    view = memoryview(text)
    for end in range(_BLOCK_BYTES, len(text) + 1, _BLOCK_BYTES):
        digest.update(view[end - _BLOCK_BYTES : end])
        blocks.append(digest.copy().digest())
    return RoutedPrompt(tokens, blocks, max(_LEAST_BLOCK_TOKENS, tokens * _BLOCK_BYTES / max(1, len(text))))


def is_token_ids(text: bytes) -> bool:
    """Returns whether a prompt's JSON looks like a list of token ids."""
    return text[:1] == b"[" and text[1:64].lstrip()[:1].isdigit()


def count_tokens(text: bytes) -> int:
    """Returns the number of tokens of a prompt's JSON, at least 1."""
    if is_token_ids(text):
        return text.count(b",") + 1
    return max(1, len(text) // _BYTES_A_TOKEN)


class PrefixIndex:
    """The blocks that a node's own cache most likely holds: those last sent to it, as many as it has room for."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._blocks: OrderedDict[Hashable, int] = OrderedDict()
        self._tokens = 0
        """The tokens of all blocks together; whole numbers, so that no rounding error adds up."""

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, prompt: RoutedPrompt) -> int:
        """Returns how many tokens from the start of the prompt the node has seen; at most all of them."""
        known = self._blocks
        matched = 0
        for block in prompt.blocks:
            if block not in known:
                break
            matched += 1
        return min(prompt.tokens, int(matched * prompt.block_tokens))

    def add(self, prompt: RoutedPrompt) -> None:
        """Notes that the node computes this prompt."""
        known, size = self._blocks, max(_LEAST_BLOCK_TOKENS, round(prompt.block_tokens))
        # last block first: what is evicted first is then the end of a prompt, not the beginning that others share
        for block in reversed(prompt.blocks):
            self._tokens += size - known.pop(block, 0)
            known[block] = size
        while self._tokens > self._capacity:
            _, dropped = known.popitem(last=False)
            self._tokens -= dropped
