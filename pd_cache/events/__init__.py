"""KV events: a vLLM node's messages about its own cache, and a subscriber that notices every loss.

`format.py` has the events, `subscriber.py` follows publishers. docs/events.md has an example.
"""

from pd_cache.events.format import (
    FULL_ATTENTION,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    ClearedEvent,
    EventBatch,
    KvEvent,
    RemovedEvent,
    StoredEvent,
    read_batch,
    short_hash,
)
from pd_cache.events.subscriber import EventEndpoints, EventSubscriber, Forget, OnSteps, Step

__all__ = [
    "FULL_ATTENTION",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "ClearedEvent",
    "EventBatch",
    "EventEndpoints",
    "EventSubscriber",
    "Forget",
    "KvEvent",
    "OnSteps",
    "RemovedEvent",
    "Step",
    "StoredEvent",
    "read_batch",
    "short_hash",
]
