"""KV events in the format of vLLM 0.32 (`vllm/distributed/kv_events.py`), without vLLM. Pure.

A batch is a msgpack array of a time, events and a rank; an event is a map with a `type`.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from pd_cache.decoding import msgpack_decoder

MEDIUM_GPU = "GPU"
MEDIUM_STORAGE = "STORAGE"
FULL_ATTENTION = frozenset((None, "full_attention", "mla_attention"))
"""The kinds of layer groups that keep the KV of every token of a prefix."""

BlockHash = int | bytes
_MASK = (1 << 64) - 1


class StoredEvent(Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks that are there now. The fields are some of vLLM's."""

    block_hashes: list[BlockHash]
    block_size: int = 0
    """Tokens of each block."""
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    """The tokens after each block that the block's hash covers, too (EAGLE and MTP in vLLM 0.33 without a
    connector); otherwise None."""


class RemovedEvent(Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks that are gone."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class ClearedEvent(Struct, tag="AllBlocksCleared", gc=False):
    """No block of this publisher is there any more."""


KvEvent = StoredEvent | RemovedEvent | ClearedEvent


class EventBatch(Struct, array_like=True, omit_defaults=True, gc=False):
    """The events that were published under one number."""

    ts: float
    """When it was published: seconds of the publisher's wall clock."""
    events: list[KvEvent]


read_batch: Callable[[bytes], EventBatch] = msgpack_decoder(EventBatch)
"""Returns the batch of a message. Raises UndecodableError if any of it is unknown here. The subscriber then
takes the publisher's cache for empty."""


def short_hash(value: BlockHash) -> int:
    """Returns the 64 bits by which this project identifies a block. vLLM publishes the last 64 bits of a
    hash; if VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0, it publishes the whole hash."""
    return value & _MASK if isinstance(value, int) else int.from_bytes(value[-8:], "big")
