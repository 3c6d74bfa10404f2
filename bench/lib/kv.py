"""What benches of one machine move: a prompt's KV in a paged cache, and the same bytes in a raw Mooncake client's memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from pd_cache.cache import BlockCache, PromptCache
from pd_cache.layout import KVLayout
from pd_cache.tiers.memory import TRAILER_BYTES
from transfer.settings import ByteSize, TransferSettings
from transfer.staging import StagingPool

_ALL = slice(None)
_COPIED_TOGETHER = 64 << 20
"""Bytes of a batch of `CopiedPool`, as many as the engine hands over together."""


CHUNK, BLOCK = 256, 16
"""Tokens of a chunk, and of a block of the paged cache."""
_KV_HEADS, _HEAD_DIM = 8, 128


class Shape(NamedTuple):
    """A prompt's KV cache; by default Llama-3.1-8B's, 128 KiB a token."""

    tokens: int = 4096
    layers: int = 32

    @property
    def chunks(self) -> int:
        return self.tokens // CHUNK

    @property
    def whole_tokens(self) -> int:
        """Those of whole chunks."""
        return self.chunks * CHUNK

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens: two for each number of K and V."""
        return self.tokens * self.layers * _KV_HEADS * 2 * _HEAD_DIM * 2

    @property
    def object_bytes(self) -> int:
        """The bytes of a chunk in the pool."""
        return self.nbytes // self.tokens * CHUNK + TRAILER_BYTES

    @property
    def pool_bytes(self) -> int:
        """Room for what raw and ours hold at the same time, below the level at which the master begins to evict."""
        return int(2.5 * self.chunks * self.object_bytes) + (256 << 20)

    @property
    def staging(self) -> TransferSettings:
        """Settings with staging memory for the prompt."""
        return TransferSettings(staging_size=ByteSize(max(self.nbytes, 64 << 20)))


class RawPool:
    """Mooncake's batch calls from and into one registered buffer that holds all objects of a prompt."""

    def __init__(self, client: Any, memory: StagingPool, keys: list[str], object_bytes: int) -> None:
        """`memory` has a slot for each object."""
        self._client = client
        self._memory = memory
        assert client.register_buffer(memory.address, memory.nbytes) == 0
        self.slots = [slot for _ in keys if (slot := memory.lease(0.0)) is not None]
        self._addresses = [slot.address for slot in self.slots]
        self._sizes = [object_bytes] * len(keys)
        self.keys = keys
        self.object_bytes = object_bytes

    def put(self, part: slice = _ALL) -> None:
        """Puts all objects, or those of this part, with one call."""
        codes = self._client.batch_put_from(self.keys[part], self._addresses[part], self._sizes[part])
        assert not any(codes), codes

    def get(self, part: slice = _ALL) -> None:
        """Gets them."""
        sizes = self._sizes[part]
        assert self._client.batch_get_into(self.keys[part], self._addresses[part], sizes) == sizes

    def remove(self, keys: list[str]) -> None:
        assert not any(self._client.batch_remove(keys, True))


class CopiedPool:
    """A `RawPool` for what lies in ordinary memory: each batch is copied to or from registered memory beside the call before."""

    def __init__(self, raw: RawPool) -> None:
        count = max(1, _COPIED_TOGETHER // raw.object_bytes)
        self._raw = raw
        self._caller = ThreadPoolExecutor(1)
        self._memory = np.ones((len(raw.keys), raw.object_bytes), np.uint8)
        self._registered = [np.frombuffer(slot.view, np.uint8) for slot in raw.slots]
        self._batches = [slice(first, first + count) for first in range(0, len(raw.keys), count)]

    def put(self) -> None:
        calls = []
        for batch in self._batches:
            for registered, memory in zip(self._registered[batch], self._memory[batch], strict=True):
                np.copyto(registered, memory)
            calls.append(self._caller.submit(self._raw.put, batch))
        for call in calls:
            call.result()

    def get(self) -> None:
        calls = [self._caller.submit(self._raw.get, batch) for batch in self._batches]
        for batch, call in zip(self._batches, calls, strict=True):
            call.result()
            for registered, memory in zip(self._registered[batch], self._memory[batch], strict=True):
                np.copyto(memory, registered)

    def close(self) -> None:
        self._caller.shutdown()


class PagedPrompt:
    """One prompt's KV in random blocks of a paged cache, and other random blocks to load it into."""

    def __init__(self, shape: Shape) -> None:
        tokens, block = shape.tokens, BLOCK
        blocks = -(-tokens // block)
        size = (shape.layers, 2 * blocks, _KV_HEADS, block, 2 * _HEAD_DIM)
        self._bits = torch.randint(-(2**15), 2**15, size, dtype=torch.int16)
        self.tensors = {str(layer): tensor for layer, tensor in enumerate(self._bits.view(torch.bfloat16).unbind())}
        self.layout = KVLayout.from_tensors(self.tensors)
        self.tokens = list(range(tokens))
        self.whole_tokens = shape.whole_tokens
        self.nbytes = shape.whole_tokens * self.layout.token_bytes
        """Of all whole chunks."""
        self._order = (torch.randperm(blocks), blocks + torch.randperm(blocks))
        self._whole_blocks = shape.whole_tokens // block
        self.source, self.target = (
            (blocks_of.unsqueeze(1) * block + torch.arange(block)).flatten()[:tokens] for blocks_of in self._order
        )

    def store(self, cache: BlockCache) -> None:
        """Stores all whole chunks, none of which the cache's pool may hold."""
        stored = PromptCache(cache).store(self.tokens, kv_caches=self.tensors, slot_mapping=self.source)
        assert stored == self.whole_tokens, f"only {stored} tokens were stored"

    def retrieve(self, cache: BlockCache) -> None:
        """Loads all whole chunks into the target."""
        mask = PromptCache(cache).retrieve(self.tokens, kv_caches=self.tensors, slot_mapping=self.target)
        assert int(mask.sum()) == self.whole_tokens, f"only {int(mask.sum())} tokens were loaded"

    def scramble(self) -> None:
        """Makes the target differ from the source everywhere."""
        source, target = self._order
        self._bits[:, target] = self._bits[:, source] ^ 1

    def arrived(self) -> bool:
        """Returns whether source and target hold the same bytes, as far as whole chunks reach."""
        source, target = (order[: self._whole_blocks] for order in self._order)
        return torch.equal(self._bits[:, source], self._bits[:, target])
