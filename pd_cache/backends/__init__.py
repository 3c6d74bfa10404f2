"""Storage for chunk objects: one interface, and the tiers behind it."""

from __future__ import annotations

from pd_cache.backends.base import Fetched, PutOutcome, Staged, StorageBackend
from pd_cache.backends.compose import open_backend

__all__ = ["Fetched", "PutOutcome", "Staged", "StorageBackend", "open_backend"]
