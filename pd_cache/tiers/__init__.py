"""Storage for chunk objects: an interface, the tiers behind it, and `open_backend`, which opens the tiers
that `cache.tiers` describes."""

from __future__ import annotations

import contextlib
import functools
import weakref

from pd_cache.config import DiskTier, LocalTier, NodeSettings
from pd_cache.metrics import BackendLevels, CacheMetrics
from pd_cache.tiers.base import PutOutcome, StorageBackend
from pd_cache.tiers.disk import LocalDiskBackend
from pd_cache.tiers.hybrid import HybridBackend, Tier
from pd_cache.tiers.local import LocalBackend
from pd_cache.tiers.memory import TRAILER_BYTES, ObjectMemory, Staged, slots_of
from pd_cache.tiers.mooncake import MooncakeBackend
from transfer.staging import Pin, StagingPool
from transfer.store import staging_pool

__all__ = ["PutOutcome", "Staged", "StorageBackend", "open_backend"]


def open_backend(
    settings: NodeSettings,
    payload_bytes: int,
    *,
    pin: Pin | None = None,
    batch_bytes: int | None = None,
    metrics: CacheMetrics | None = None,
) -> StorageBackend:
    """Returns the backend that `cache.tiers` describes, for payloads of one size.

    Waits neither for the pool nor for a disk. `pin` page-locks the memory for a GPU. `batch_bytes`: the most
    bytes of a transfer, by default 64 MiB; with fewer, more of short reads overlaps. Raises ValueError if
    `transfer.staging_size` is too small for a chunk.
    """
    tiers, transfer, metrics = settings.cache.tiers, settings.transfer, metrics or CacheMetrics()
    kinds = [str(tier.__struct_config__.tag) for tier in tiers]
    # a tier's name is its kind, with a number from the second tier of that kind on
    names = [f"{kind}-{kinds[:n].count(kind)}" if kind in kinds[:n] else kind for n, kind in enumerate(kinds)]
    counts = [metrics.tier(name) for name in names]
    object_bytes, staging = payload_bytes + TRAILER_BYTES, slots_of(transfer.staging_size, payload_bytes)
    slot_bytes = StagingPool.stride_of(object_bytes)
    if not staging:  # the slots of local tiers are no substitute: a full tier leaves none of them free
        raise ValueError(
            f"the staging memory holds no slot of {object_bytes} bytes; make it at least {slot_bytes} bytes"
        )
    kept = sum(slots_of(tier.capacity, payload_bytes) for tier in tiers if isinstance(tier, LocalTier))
    slots = staging_pool(transfer, object_bytes, reserve=kept * slot_bytes, pin=pin)
    memory = ObjectMemory(slots, payload_bytes)
    with contextlib.ExitStack() as opened:
        opened.callback(memory.close)
        parts: list[Tier] = []
        for tier, count in zip(tiers, counts, strict=True):
            if isinstance(tier, LocalTier):  # a put into memory never waits
                part = Tier(LocalBackend(memory, tier, transfer.timeouts, count), count, promote=tier.promote)
            elif isinstance(tier, DiskTier):
                disk = LocalDiskBackend(memory, tier, transfer.timeouts, count, slots=staging)
                part = Tier(disk, count, tier.blocking, tier.promote)
            else:
                pool = MooncakeBackend(settings, memory, batch_bytes=batch_bytes, metrics=count)
                part = Tier(pool, count, tier.blocking)
            opened.callback(part.backend.close)
            parts.append(part)
        opened.pop_all()
    backend = parts[0].backend
    if len(parts) > 1 or not isinstance(backend, MooncakeBackend):
        backend = HybridBackend(parts, backlog=staging // 2, close_s=transfer.timeouts.close_ms / 1000)
    metrics.levels.add(functools.partial(_levels, weakref.ref(backend), staging))
    return backend


def _levels(opened: weakref.ref[StorageBackend], slots: int) -> BackendLevels | None:
    """Reports on a backend's memory and on its pool for as long as the backend is open. `slots`: how many
    slots local tiers do not keep objects in."""
    backend = opened()
    if backend is None or backend.memory.pool.closed:
        return None
    parts = [tier.backend for tier in backend.tiers] if isinstance(backend, HybridBackend) else [backend]
    kept = sum(len(part.index) for part in parts if isinstance(part, LocalBackend))
    memory = backend.memory.pool
    slot_bytes = StagingPool.stride_of(backend.memory.object_bytes)
    used = max(0, memory.in_use - kept) * slot_bytes
    if not isinstance(parts[-1], MooncakeBackend):
        return BackendLevels(slots * slot_bytes, used, memory.forfeited_bytes, None)
    store = parts[-1].store
    segment = store.hostname if store.segment_size else ""
    size = store.segment_size if segment else 0
    return BackendLevels(slots * slot_bytes, used, memory.forfeited_bytes, store.available, segment, size)
