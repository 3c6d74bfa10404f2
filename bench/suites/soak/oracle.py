"""What must lie in a paged buffer: every byte of KV is a function of the tokens up to it, all other bytes a canary.

The KV of token i is one 64-bit number, which names the whole prefix up to i and the weights that computed it, combined with a fixed
number for each word of its KV. So a wrong word says which prefix it belongs to, and tokens, words, heads, layers and blocks in a wrong
place are seen. A chunk may be of earlier weights: which ones is recognised, and judged apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from bench.suites.soak.plan import CHUNK, LONGEST

LAYERS, HEADS, WORDS = 2, 2, 128
"""KV of a token: `WORDS` 64-bit words for each head of each layer; 4 KiB in all."""
BLOCK = CHUNK
BLOCKS = LONGEST + 24
"""Blocks of a lane's paged buffer: room for the longest prompt, and some that stay untouched."""
TOKEN_BYTES = LAYERS * HEADS * WORDS * 8
_SHOWN = 4
_MASK = (1 << 64) - 1

Words = np.ndarray[Any, np.dtype[np.uint64]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]

_TABLE: Words = np.random.default_rng(20).integers(1, _MASK, (LAYERS, HEADS, WORDS), dtype=np.uint64)


class Wrong(NamedTuple):
    """A slot that does not hold what it must."""

    slot: int
    token: int
    """Its index in the prompt, or -1 for a slot that the operation must not touch."""
    expected: str
    got: str
    """The first word that differs, in hexadecimal."""
    belongs_to: str
    """The prefix to which the word belongs, if this engine has used it; empty otherwise."""


def prefixes(tokens: Sequence[int], weights: int = 0) -> Words:
    """Returns one number for each token, which names the prefix that ends with it under the weights of this number; uint64 [n]."""
    value, found = 0x9E3779B97F4A7C15 * (weights + 1) & _MASK, []  # unlike any that a token could make of it
    for token in tokens:
        value = ((value ^ (token + 1)) * 0xBF58476D1CE4E5B9) & _MASK
        value ^= value >> 29
        found.append(value)
    return np.array(found, dtype=np.uint64)


def kv_of(names: Words) -> Words:
    """Returns the KV of tokens with these prefixes; uint64 [n, layers, heads, words]."""
    return np.bitwise_xor(names[:, None, None, None], _TABLE[None])


class PagedBuffer:
    """A paged buffer like an engine's, with an oracle."""

    _known: ClassVar[dict[int, str]] = {}
    """The prefixes that all buffers of the process know, by name."""

    def __init__(self) -> None:
        self.whole = torch.zeros((LAYERS, BLOCKS, HEADS, BLOCK, WORDS), dtype=torch.int64)
        self.tensors = {
            f"layers.{index}": layer for index, layer in enumerate(self.whole.view(torch.bfloat16).unbind())
        }

    @property
    def words(self) -> Words:
        """The same memory. A cache server's client may have moved it, so it is looked up each time."""
        view: Words = self.whole.numpy().view(np.uint64)
        return view

    def know(self, names: Words, what: str) -> None:
        """Remember whose prefixes these are, for `Wrong.belongs_to`."""
        if len(self._known) > 400_000:
            self._known.clear()
        for index, name in enumerate(names[CHUNK - 1 :: CHUNK].tolist(), start=1):
            self._known[name] = f"{what} up to token {index * CHUNK}"

    def fill(self, canary: int) -> None:
        """Puts the canary into every word."""
        self.words.fill(canary)

    def put(self, slots: Numbers, names: Words) -> None:
        """Writes the KV of tokens, as an engine does when it computes them."""
        blocks, offsets = slots // BLOCK, slots % BLOCK
        self.words[:, blocks, :, offsets, :] = kv_of(names)

    def recognise(self, slots: Numbers, names_under: Callable[[int], Words], newest: int) -> tuple[Words, int]:
        """Returns the names that the tokens in `slots` must have, and the earliest weights that computed any of them.

        The slots are those of whole chunks, each of which may have been computed with any weights from 0 to `newest`. `names_under` returns
        the names of all these tokens under given weights. A chunk that no weights explain gets its names under `newest`: `compare` finds it
        wrong.
        """
        first = slots[::CHUNK]
        got = self.words[0, first // BLOCK, 0, first % BLOCK, 0] ^ _TABLE[0, 0, 0]
        names, earliest = names_under(newest).copy(), newest
        unexplained = got != names[::CHUNK]
        for weights in range(newest - 1, -1, -1):
            if not unexplained.any():
                break
            older = names_under(weights)
            found = unexplained & (got == older[::CHUNK])
            if found.any():
                tokens = np.repeat(found, CHUNK)
                names[tokens], earliest = older[tokens], weights
                unexplained &= ~found
        return names, earliest

    def compare(self, slots: Numbers, names: Words, may_differ: Numbers, canary: int) -> tuple[int, list[Wrong]]:
        """Returns how many slots are wrong, and the first of them.

        `slots` must hold the KV of `names`, `may_differ` anything, all others the canary. Afterwards all hold the canary.
        """
        words = self.words
        blocks, offsets = slots // BLOCK, slots % BLOCK
        got, expected = words[:, blocks, :, offsets, :], kv_of(names)
        bad = (got != expected).any(axis=(1, 2, 3))
        found = [
            self._wrong(int(slots[index]), int(index), expected[index], got[index])
            for index in np.flatnonzero(bad)[:_SHOWN]
        ]
        for done in (slots, may_differ):
            words[:, done // BLOCK, :, done % BLOCK, :] = canary
        count = int(bad.sum())
        if not bool((words == canary).all()):
            strange = (words != canary).any(axis=(0, 2, 4)).reshape(-1)
            count += int(strange.sum())
            for slot in np.flatnonzero(strange)[:_SHOWN]:
                there = words[:, slot // BLOCK, :, slot % BLOCK, :]
                found.append(self._wrong(int(slot), -1, np.full_like(there, canary), there))
        return count, found

    def _wrong(self, slot: int, token: int, expected: Words, got: Words) -> Wrong:
        place = np.unravel_index(int(np.flatnonzero((expected != got).reshape(-1))[0]), got.shape)
        word = int(got[place])
        name = word ^ int(_TABLE[place])
        return Wrong(slot, token, f"{int(expected[place]):016x}", f"{word:016x}", self._known.get(name, ""))


def places(rng: random.Random, count: int, scattered: bool) -> Numbers:
    """Returns `count` different slots: whole blocks anywhere in the buffer, or single slots anywhere; int64 [count]."""
    if scattered:
        return np.array(rng.sample(range(BLOCKS * BLOCK), count), dtype=np.int64)
    blocks = np.array(rng.sample(range(BLOCKS), -(-count // BLOCK)), dtype=np.int64)
    return (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[:count]
