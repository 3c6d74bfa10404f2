"""Storage for chunk objects: an interface, the tiers behind it, and `open_backend`, which opens the tiers
that `cache.tiers` describes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pd_cache.config import DiskTier, LocalTier, NodeSettings
from pd_cache.metrics import BackendLevels, CacheMetrics
from pd_cache.tiers.base import PutOutcome, StorageBackend
from pd_cache.tiers.disk import LocalDiskBackend
from pd_cache.tiers.hybrid import HybridBackend, Tier
from pd_cache.tiers.local import LocalBackend
from pd_cache.tiers.memory import TRAILER_BYTES, ObjectMemory, Staged, slots_of
from transfer.staging import Pin, StagingPool

if TYPE_CHECKING:
    from transfer.store import MooncakeStore

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
    slot_bytes, staging = (
        StagingPool.stride_of(payload_bytes + TRAILER_BYTES),
        slots_of(transfer.staging_size, payload_bytes),
    )
    if not staging:  # the slots of local tiers are no substitute: a full tier leaves none of them free
        raise ValueError(
            f"the staging memory holds no slot of {payload_bytes + TRAILER_BYTES} bytes; make it at least {slot_bytes} bytes"
        )
    kept = sum(slots_of(tier.capacity, payload_bytes) for tier in tiers if isinstance(tier, LocalTier))
    reserve, pool = kept * slot_bytes, None
    with contextlib.ExitStack() as opened:
        if "mooncake" in kinds:
            # imported here: a node without a pool needs no Mooncake
            from pd_cache.tiers.mooncake import MooncakeBackend

            count = counts[kinds.index("mooncake")]
            pool = MooncakeBackend(
                settings, payload_bytes, pin=pin, reserve=reserve, batch_bytes=batch_bytes, metrics=count
            )
            opened.callback(pool.close)
            memory = pool.memory
        else:
            slots = StagingPool(
                transfer.staging_size + reserve,
                payload_bytes + TRAILER_BYTES,
                prefaulted=transfer.prefault,
                pin=pin,
                headroom=staging // 4,
            )
            memory = ObjectMemory(slots, payload_bytes)
        parts: list[Tier] = []
        for tier, count in zip(tiers, counts, strict=True):
            if isinstance(tier, LocalTier):  # a put into memory never waits
                part = Tier(LocalBackend(memory, tier, transfer.timeouts, count), count, promote=tier.promote)
            elif isinstance(tier, DiskTier):
                disk = LocalDiskBackend(memory, tier, transfer.timeouts, count, slots=staging)
                part = Tier(disk, count, tier.blocking, tier.promote)
            else:
                assert pool is not None
                part = Tier(pool, count, tier.blocking)
            opened.callback(part.backend.close)
            parts.append(part)
        shelves = [part.backend for part in parts if isinstance(part.backend, LocalBackend)]
        metrics.levels.add(_levels(memory, staging, shelves, None if pool is None else pool.store))
        opened.pop_all()
    if pool is not None and len(parts) == 1:
        return pool
    return HybridBackend(parts, backlog=staging // 2, close_s=transfer.timeouts.close_ms / 1000)


def _levels(
    memory: ObjectMemory, slots: int, shelves: Sequence[LocalBackend], store: MooncakeStore | None
) -> Callable[[], BackendLevels | None]:
    """Returns a function that reports on the memory and on the pool for as long as the memory is open. The
    function keeps nothing alive. `shelves`: the tiers that keep objects in the memory besides these
    `slots`."""
    opened, keeping = weakref.ref(memory), [weakref.ref(shelf) for shelf in shelves]
    reached = None if store is None else weakref.ref(store)

    def levels() -> BackendLevels | None:
        memory, store = opened(), None if reached is None else reached()
        if memory is None or memory.pool.closed:
            return None
        kept = sum(len(shelf.index) for reference in keeping if (shelf := reference()) is not None)
        slot_bytes = StagingPool.stride_of(memory.object_bytes)
        used, forfeited = max(0, memory.pool.in_use - kept) * slot_bytes, memory.pool.forfeited_bytes
        if store is None:
            return BackendLevels(slots * slot_bytes, used, forfeited, None)
        segment = store.hostname if store.segment_size else ""
        size = store.segment_size if segment else 0
        return BackendLevels(slots * slot_bytes, used, forfeited, store.available, segment, size)

    return levels
