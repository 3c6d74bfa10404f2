"""KV events in the format of vLLM 0.32 (`vllm/distributed/kv_events.py`), without vLLM. Pure.

A batch is a msgpack array of a time, events and a rank; an event is a map with a `type`.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from pd_cache.decoding import UndecodableError, msgpack_decoder

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


class _RawBatch(Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


class _OtherEvent(Struct, gc=False):
    type: str


_whole_batch = msgpack_decoder(EventBatch)
_raw_batch = msgpack_decoder(_RawBatch)
_one_event = msgpack_decoder(KvEvent)
_other_event = msgpack_decoder(_OtherEvent)


def read_batch(raw: bytes) -> tuple[EventBatch, int]:
    """Returns the batch of a message, and how many of its events were skipped.

    An unreadable event of stored blocks is skipped: an unknown block does no harm. Mooncake's master sends
    such events, with a `block_size` of null. Any other unreadable event may say that blocks are gone, and
    counts as `ClearedEvent`. Raises UndecodableError if `raw` is no batch.
    """
    try:
        return _whole_batch(raw), 0
    except UndecodableError:
        batch = _raw_batch(raw)
    events: list[KvEvent] = []
    for event in batch.events:
        try:
            events.append(_one_event(event))
        except UndecodableError:
            if _other_event(event).type != "BlockStored":
                events.append(ClearedEvent())
    return EventBatch(batch.ts, events), len(batch.events) - len(events)


def short_hash(value: BlockHash) -> int:
    """Returns the 64 bits by which this project identifies a block. vLLM publishes the last 64 bits of a
    hash; if VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0, it publishes the whole hash."""
    return value & _MASK if isinstance(value, int) else int.from_bytes(value[-8:], "big")
