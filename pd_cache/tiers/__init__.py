"""Storage for chunk objects: one interface, the tiers behind it, and `open_backend`, which opens what `cache.tiers` describes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pd_cache.config import DiskTier, LocalTier, MooncakeTier, NodeSettings
from pd_cache.metrics import BackendLevels, CacheMetrics
from pd_cache.tiers.base import PutOutcome, StorageBackend
from pd_cache.tiers.disk import LocalDiskBackend
from pd_cache.tiers.hybrid import HybridBackend, Tier
from pd_cache.tiers.local import LocalBackend
from pd_cache.tiers.memory import TRAILER_BYTES, ObjectMemory, Staged, slots_of
from transfer.staging import Pin, StagingPool

if TYPE_CHECKING:
    from pd_cache.tiers.mooncake import MooncakeBackend
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

    Waits neither for the pool nor for a disk. `pin` page-locks the memory for a GPU. `batch_bytes`: how much one transfer moves at most,
    by default 64 MiB; less lets more of short reads overlap. Raises ValueError if `transfer.staging_size`
    is too small for one chunk.
    """
    tiers, transfer = settings.cache.tiers, settings.transfer
    metrics = metrics or CacheMetrics()
    names = _names([str(tier.__struct_config__.tag) for tier in tiers])
    reserve = sum(_reserved(tier, payload_bytes) for tier in tiers)
    if not slots_of(transfer.staging_size, payload_bytes):
        # the slots that local tiers reserve are no substitute: once a tier is full, none of them is free
        slot = StagingPool.stride_of(payload_bytes + TRAILER_BYTES)
        raise ValueError(
            f"the staging memory holds no slot of {payload_bytes + TRAILER_BYTES} bytes; make it at least {slot} bytes"
        )
    opened: list[StorageBackend] = []
    store: MooncakeStore | None = None
    try:
        pool = next((tier for tier in tiers if isinstance(tier, MooncakeTier)), None)
        if pool is not None:
            # imported here: a node without a pool needs no Mooncake
            from pd_cache.tiers.mooncake import BATCH_BYTES, MooncakeBackend

            mooncake = MooncakeBackend(
                settings,
                payload_bytes,
                pin=pin,
                reserve=reserve,
                batch_bytes=batch_bytes or BATCH_BYTES,
                metrics=metrics.tier(names[tiers.index(pool)]),
            )
            opened.append(mooncake)
            memory, store = mooncake.memory, mooncake.store
            if len(tiers) == 1:
                _report_levels(metrics, memory, 0, [], store)
                return mooncake
        else:
            slots = StagingPool(
                transfer.staging_size + reserve,
                payload_bytes + TRAILER_BYTES,
                prefaulted=transfer.prefault,
                pin=pin,
                headroom=slots_of(transfer.staging_size, payload_bytes) // 4,
            )
            memory = ObjectMemory(slots, payload_bytes)
        # without the slots in which local tiers keep objects
        staging = memory.pool.slots - reserve // StagingPool.stride_of(memory.object_bytes)
        parts: list[Tier] = []
        shelves: list[LocalBackend] = []
        for tier, name in zip(tiers, names, strict=True):
            counts = metrics.tier(name)
            backend: StorageBackend
            if isinstance(tier, MooncakeTier):
                if tier is pool:
                    parts.append(Tier(mooncake, counts, tier.blocking))
                elif (second := settings.second_pool) is not None:
                    behind = MooncakeBackend(
                        second,
                        payload_bytes,
                        batch_bytes=batch_bytes or BATCH_BYTES,
                        metrics=counts,
                        shared=mooncake.memory,
                    )
                    opened.append(behind)
                    counts.off_unless(_up(behind))
                    parts.append(Tier(behind, counts, blocking=False, stores=False))
                continue
            if isinstance(tier, DiskTier):
                backend = LocalDiskBackend(memory, tier, transfer.timeouts, counts, slots=staging)
            else:
                backend = local = LocalBackend(memory, tier, transfer.timeouts, counts)
                shelves.append(local)
            opened.append(backend)
            # a put into memory never waits
            blocking = tier.blocking if isinstance(tier, DiskTier) else True
            parts.append(Tier(backend, counts, blocking, tier.promote))
        _report_levels(metrics, memory, reserve, shelves, store)
        return HybridBackend(parts, backlog=staging // 2, close_s=transfer.timeouts.close_ms / 1000)
    except BaseException:
        for one in opened:
            one.close()
        raise


def _report_levels(
    metrics: CacheMetrics,
    memory: ObjectMemory,
    reserve: int,
    shelves: Sequence[LocalBackend],
    store: MooncakeStore | None,
) -> None:
    """Has the metrics report on the memory and on the pool for as long as the backend is open. `shelves`: the tiers that keep objects in
    the memory, for which `reserve` bytes of it are mapped."""
    opened, slot_bytes = weakref.ref(memory), StagingPool.stride_of(memory.object_bytes)
    keeping = [weakref.ref(shelf) for shelf in shelves]
    reached = None if store is None else weakref.ref(store)

    def levels() -> BackendLevels | None:
        memory, store = opened(), None if reached is None else reached()
        if memory is None or memory.pool.closed:
            return None
        kept = sum(len(shelf.index) for one in keeping if (shelf := one()) is not None)
        used = max(0, memory.pool.in_use - kept) * slot_bytes
        total = memory.pool.slots * slot_bytes - reserve
        forfeited = memory.pool.forfeited_bytes
        if store is None:
            return BackendLevels(total, used, forfeited, None)
        segment = store.hostname if store.segment_size else ""
        return BackendLevels(total, used, forfeited, store.available, segment, store.segment_size if segment else 0)

    metrics.levels.add(levels)


def _up(second: MooncakeBackend) -> Callable[[], bool]:
    """Returns a function that returns False while a second pool is known to be unusable, until it is closed. Keeps nothing alive."""
    opened, reached = weakref.ref(second.memory), weakref.ref(second.store)

    def up() -> bool:
        memory, store = opened(), reached()
        return memory is None or memory.pool.closed or store is None or store.available

    return up


def _reserved(tier: object, payload_bytes: int) -> int:
    """Returns the bytes of shared memory in which a tier keeps objects."""
    if not isinstance(tier, LocalTier):
        return 0
    return slots_of(tier.capacity, payload_bytes) * StagingPool.stride_of(payload_bytes + TRAILER_BYTES)


def _names(kinds: list[str]) -> list[str]:
    """Returns a name for each tier: its kind, with a number from the second tier of that kind on."""
    return [f"{kind}-{kinds[:n].count(kind)}" if kind in kinds[:n] else kind for n, kind in enumerate(kinds)]
