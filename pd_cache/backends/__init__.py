"""Where chunk objects live: one interface, and the tiers behind it."""

from __future__ import annotations

from pd_cache.backends.base import Fetched, PutOutcome, Staged, StorageBackend
from pd_cache.config import NodeSettings
from transfer.staging import Pin

__all__ = ["Fetched", "PutOutcome", "Staged", "StorageBackend", "open_backend"]


def open_backend(settings: NodeSettings, payload_bytes: int, *, pin: Pin | None = None) -> StorageBackend:
    """The backend that the `cache.tiers` of the settings describe, for payloads of one size."""
    from pd_cache.backends.mooncake import MooncakeBackend

    return MooncakeBackend(settings, payload_bytes, pin=pin)
