"""Identifies prompts for routing: by a guess from their bytes, and by the hashes that nodes and the pool use.
Pure.

Many prompts need no tokenizer, because the same bytes make the same tokens. The proxy cuts a prompt's JSON
text into blocks, and names each block by a hash over everything up to its end. If two clients spell the same
prompt differently, it is merely not recognised.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Container, Hashable, Iterable, Sequence
from typing import NamedTuple

from pd_cache.chunks import BlockHasher, ChunkedTokenDatabase, MediaItem, Namespace, salt_keys, stride_hashes

_BLOCK_BYTES = 2048
"""About 350 token ids, or 500 tokens of text."""
_BYTES_A_TOKEN = 4
"""An estimate for prompts in text. Token ids are counted instead."""
_LEAST_BLOCK_TOKENS = 64
"""The fewest tokens that a block counts as, so that the size of an index is bounded for every kind of
prompt."""


class PromptTokens(NamedTuple):
    """The tokens and media from which a prompt's chunks are named."""

    ids: list[int]
    media: Sequence[MediaItem] = ()
    """The media, in the order of their places in the prompt."""


class NamedPrompt(NamedTuple):
    """A prompt by the hashes of its blocks."""

    fingerprint: str
    """The fingerprint of the namespace that the hashes are made for."""
    tokens: int
    blocks: Sequence[int] = ()
    """The short hashes of its whole blocks; empty if chunks are not named by the engine's blocks."""
    block_tokens: int = 1
    chunk_tokens: int = 1
    pool_tokens: int | None = None
    """How much of it the pool holds, in tokens; None if that is not known."""
    names: Sequence[bytes] = ()
    """The names of its whole chunks."""


class RoutedPrompt(NamedTuple):
    """A prompt as routing knows it."""

    tokens: int
    """The prompt's length: counted if it is token ids, otherwise estimated."""
    blocks: Sequence[Hashable] = ()
    """The names of its blocks. Each stands for everything up to the block's end."""
    block_tokens: float = _LEAST_BLOCK_TOKENS
    """The number of tokens per block."""
    named: NamedPrompt | None = None
    """The names under which nodes and the pool know the prompt; None if unknown."""
    unnamed: str = ""
    """The reason why a prompt that was looked up has no names."""

    @property
    def found(self) -> int:
        """How many of the prompt's tokens the pool holds, as far as that is known."""
        return (self.named and self.named.pool_tokens) or 0

    def counted(self, tokens: int) -> RoutedPrompt:
        """Returns the prompt with its true number of tokens, which counts as at least 1."""
        tokens = max(1, tokens)
        return self._replace(tokens=tokens, block_tokens=self.block_tokens * tokens / self.tokens)


def read_prompt(text: bytes, isolation: bytes = b"") -> RoutedPrompt:
    """Returns what routing needs to know about a prompt. `text` is its JSON. Prompts of different `isolation`
    (model, salt) share nothing."""
    tokens = text.count(b",") + 1 if is_token_ids(text) else max(1, len(text) // _BYTES_A_TOKEN)
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


def leading(blocks: Iterable[Hashable], known: Container[Hashable]) -> int:
    """Returns how many of the first blocks of a prompt are known."""
    count = 0
    for block in blocks:
        if block not in known:
            break
        count += 1
    return count


class PrefixIndex:
    """Remembers the blocks that a node's own cache probably holds: the blocks of the last prompts that were
    sent to the node, as many as the cache has room for."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        """May change: the index forgets more with the next prompt, or less."""
        self._blocks: OrderedDict[Hashable, int] = OrderedDict()
        self._tokens = 0
        """The tokens of all blocks together. An integer, so that rounding errors do not add up."""

    def match(self, prompt: RoutedPrompt) -> int:
        """Returns how many tokens from the start of the prompt the node has seen."""
        return min(prompt.tokens, int(leading(prompt.blocks, self._blocks) * prompt.block_tokens))

    def add(self, prompt: RoutedPrompt) -> None:
        known, size = self._blocks, max(_LEAST_BLOCK_TOKENS, round(prompt.block_tokens))
        # last block first, so that the end of a prompt is evicted first, and not the beginning that others
        # share
        for block in reversed(prompt.blocks):
            self._tokens += size - known.pop(block, 0)
            known[block] = size
        while self._tokens > self.capacity_tokens:
            _, dropped = known.popitem(last=False)
            self._tokens -= dropped


class PromptNamer:
    """Hashes prompts in the same way as the nodes of a namespace."""

    def __init__(self, namespace: Namespace, seeds: Collection[str] = ()) -> None:
        """`seeds`: further seeds, besides this process's own, from which vLLM's block hashes may start.

        Raises UnknownHashesError or ValueError, which say why, if the hashes cannot be computed here.
        """
        self.fingerprint = namespace.fingerprint()
        self.chunk_size = namespace.chunk_size
        self._hasher = (
            BlockHasher(namespace.block_size, namespace.hash_seed, seeds)
            if namespace.hash_mode == "blocks"
            else None
        )
        self._database = ChunkedTokenDatabase(namespace)

    def name(self, tokens: list[int], salt: str | None, media: Sequence[MediaItem] = ()) -> NamedPrompt:
        """Returns the hashes of a prompt. Raises ValueError if an element is no token id. Takes 0.3 µs a
        token."""
        if self._hasher is None:
            names, blocks, step = self._database.name_media_chunks(tokens, salt_keys(salt), media), [], 1
        else:
            hashes, step = self._hasher.hashes(tokens, salt, media), self._hasher.block_size
            names = stride_hashes(hashes, self.chunk_size // step)
            blocks = [int.from_bytes(value[-8:], "big") for value in hashes]
        return NamedPrompt(self.fingerprint, len(tokens), blocks, step, self.chunk_size, None, names)

    def name_blocks(self, hashes: Sequence[bytes]) -> NamedPrompt:
        """Returns the prompt whose blocks have these hashes. If chunks are not named by blocks, these are the
        hashes of its chunks.

        Raises ValueError for a hash of less than 8 bytes.
        """
        step = self.chunk_size if self._hasher is None else self._hasher.block_size
        names = stride_hashes(hashes, self.chunk_size // step)
        return NamedPrompt(self.fingerprint, len(hashes) * step, (), 1, self.chunk_size, None, names)
