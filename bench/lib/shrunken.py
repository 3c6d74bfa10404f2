"""An engine's paged cache in miniature: one page a block of a trace, a few KiB long, whose bytes follow from the block's number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from bench.lib.trace import BLOCK_TOKENS
from pd_cache.layout import KVLayout
from pd_cache.tiers.memory import TRAILER_BYTES

Words = npt.NDArray[np.uint64]

STEP_BYTES = 2 * BLOCK_TOKENS
"""Chunks are a multiple of this: one half-precision number a token."""

_FIRST, _NEXT = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D  # odd, so that no two blocks or words come out equal


class ShrunkenCache:
    """Pages to store from, and as many to load into. Block `b` always has the same bytes, on every machine."""

    def __init__(self, blocks: int, chunk_bytes: int) -> None:
        """`blocks` of the longest prompt; `chunk_bytes` a multiple of STEP_BYTES."""
        self._blocks = blocks
        self._bits = torch.zeros((2 * blocks, BLOCK_TOKENS, chunk_bytes // STEP_BYTES), dtype=torch.int16)
        self._words = np.arange(chunk_bytes // 8, dtype=np.uint64) * np.uint64(_NEXT)
        slots = torch.arange(2 * blocks * BLOCK_TOKENS)
        self._source, self._target = slots[: blocks * BLOCK_TOKENS], slots[blocks * BLOCK_TOKENS :]
        self.tensors = [self._bits.view(torch.float16)]
        self.layout = KVLayout.from_tensors(self.tensors)

    def fill(self, blocks: Sequence[int]) -> torch.Tensor:
        """Writes the pages of a prompt's blocks; the slot mapping to store them from."""
        self._pages(0, len(blocks))[:] = self._bytes_of(blocks)
        return self._source[: len(blocks) * BLOCK_TOKENS]

    def target(self, blocks: int) -> torch.Tensor:
        """Returns the slot mapping to load so many blocks into; their pages are cleared."""
        self._pages(self._blocks, blocks)[:] = 0
        return self._target[: blocks * BLOCK_TOKENS]

    def arrived(self, blocks: Sequence[int]) -> bool:
        """Returns whether the target holds exactly the bytes of these blocks."""
        return np.array_equal(self._pages(self._blocks, len(blocks)), self._bytes_of(blocks))

    def _pages(self, first: int, count: int) -> Words:
        return cast(Words, self._bits[first : first + count].flatten(1).numpy().view(np.uint64))

    def _bytes_of(self, blocks: Sequence[int]) -> Words:
        seeds = (np.array(blocks, dtype=np.uint64) + np.uint64(1)) * np.uint64(_FIRST)
        return cast(Words, seeds[:, None] ^ self._words)


def object_bytes(chunk_bytes: int) -> int:
    """Returns the bytes of a chunk's object in the pool."""
    return chunk_bytes + TRAILER_BYTES


def allotted_bytes(nbytes: int) -> int:
    """Returns what Mooncake's allocator sets aside for an object: the next size with three binary digits after the first.

    So an object a little larger than a power of two takes an eighth more. Mooncake's own metrics count the bytes asked for.
    """
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step
