"""LocalBackend: keeps objects in this process's memory.

Nothing is copied: an entry is a reference to its object's slot (`memory.py`), and a reader gets the slot
itself. Each entry takes a whole slot, so memory cannot fragment. An entry that is being read is pinned, and
never evicted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Sequence

from pd_cache.chunks import Keys
from pd_cache.config import LocalTier
from pd_cache.metrics import TierMetrics
from pd_cache.tiers.base import PutOutcome, Settled, StorageBackend
from pd_cache.tiers.index import Entry, EvictingIndex
from pd_cache.tiers.memory import Damage, Fetched, ObjectMemory, Staged, inspect, slots_of
from transfer.deadlines import End, end_or
from transfer.errors import Status
from transfer.settings import Timeouts

log = logging.getLogger(__name__)

_TOGETHER_BYTES = 256 << 20
"""The most bytes that a reader gets at once. With so many bytes, a GPU's copies go on without a gap between
two batches."""


class LocalBackend(StorageBackend):
    """Keeps objects in their slots, within a byte budget, by an eviction policy."""

    kind = "memory"

    def __init__(
        self, memory: ObjectMemory, tier: LocalTier, timeouts: Timeouts, metrics: TierMetrics
    ) -> None:
        """`memory` must have spare slots for all objects that fit into the tier."""
        self.memory = memory
        self._timeouts = timeouts
        self.payload_bytes = memory.payload_bytes
        self.batch_size = memory.batch_size
        self.together = max(1, _TOGETHER_BYTES // max(1, self.payload_bytes))
        self.index: EvictingIndex[Staged] = EvictingIndex(
            slots_of(tier.capacity, memory.payload_bytes), tier.policy
        )
        self._metrics = metrics
        self._closed = False
        self._kept_pins: dict[str, list[Entry[Staged]]] = {}
        """The pins that `pin` took, by key."""
        self._holding = threading.Lock()
        if not self.index.capacity:
            log.warning("tier %s holds nothing: its capacity is smaller than one object", metrics.tier)

    @property
    def available(self) -> bool:
        return not self._closed

    def wait_available(self, timeout: float) -> None:
        return

    def batched_contains(self, keys: Keys, end: End = None) -> list[Status]:
        if self._closed:
            return [Status.CLOSED] * len(keys)
        return [Status.OK if found else Status.MISSING for found in self.index.contains(keys)]

    def batched_fetch(
        self, keys: Keys, *, payload_bytes: int | None = None, end: End = None
    ) -> Generator[list[Fetched], None, None]:
        size = self.memory.read_size(payload_bytes)
        pins: list[Entry[Staged] | None] = []  # as many as `served` belong to outcomes
        served = 0
        try:
            # pins all at once, so that objects that this reader adds do not evict objects that it is about to
            # read
            for key in keys:
                pins.append(self.index.pin(key))
            while served < len(keys):
                part = slice(served, served + self.together)
                together = []
                for key, pin in zip(keys[part], pins[part], strict=True):
                    served += 1
                    together.append(self._missing() if pin is None else self._read(key, pin, size))
                yield together
        finally:
            for left in pins[served:]:
                if left is not None:
                    self._unpin(left)

    def stage(self, *, payload_bytes: int | None = None, end: End = None) -> Staged | None:
        return self.memory.stage(end_or(end, self._timeouts.put_ms), payload_bytes=payload_bytes)

    def batched_put(self, keys: Keys, staged: Sequence[Staged], end: End = None) -> PutOutcome:
        items = self.memory.own(staged, keys)
        statuses: list[Status] = []
        try:
            for key, item in zip(keys, items, strict=True):
                statuses.append(self._put(key, item))
        finally:
            for item in items[len(statuses) :]:
                item.release()
        return Settled(statuses)

    def batched_remove(self, keys: Keys, end: End = None, *, force: bool = False) -> list[Status]:
        return [self._remove(key) for key in keys]

    def pin(self, keys: Keys) -> Keys:
        """Pins at most half of the entries, so that new objects find room."""
        pinned = []
        with self._holding:
            for key in keys:
                room = key in self._kept_pins or len(self._kept_pins) < self.index.capacity // 2
                pin = self.index.pin(key) if room and not self._closed else None
                if pin is not None:
                    self._kept_pins.setdefault(key, []).append(pin)
                    pinned.append(key)
        return pinned

    def unpin(self, keys: Keys) -> None:
        with self._holding:
            for key in keys:
                if pins := self._kept_pins.get(key):
                    self._unpin(pins.pop())
                    if not pins:
                        del self._kept_pins[key]

    def annotate(self, key: str, value: bytes, end: End = None) -> Status:
        return Status.CLOSED if self._closed else Status.OK  # nobody would read a note in memory

    def close(self) -> None:
        self._closed = True
        with self._holding:
            kept, self._kept_pins = self._kept_pins, {}
        for pins in kept.values():
            for pin in pins:
                self._unpin(pin)
        for kept_object in self.index.close():
            kept_object.release()
        self.memory.close()

    def _missing(self) -> Fetched:
        return Fetched(None, (Status.CLOSED if self._closed else Status.MISSING).value)

    def _read(self, key: str, entry: Entry[Staged], size: int) -> Fetched:
        kept = entry.resource
        found = inspect(key, kept.slot.view[: kept.object_bytes], size)
        if isinstance(found, Damage):
            self._discard(entry)
            self._unpin(entry)
            return Fetched(None, found.value)
        return Fetched(
            kept.share(), expected=found, source=entry, tier=self.kind, on_release=lambda: self._unpin(entry)
        )

    def _forget(self, damaged: Fetched) -> None:
        self._discard(damaged.source)

    def _discard(self, entry: Entry[Staged]) -> None:
        self.index.discard(entry)
        self._count()
        self._metrics.healed()

    def _unpin(self, entry: Entry[Staged]) -> None:
        if self.index.unpin(entry):
            entry.resource.release()

    def _put(self, key: str, item: Staged) -> Status:
        item.seal(key)
        refusal, evicted = self.index.reserve(key)
        for victim in evicted:
            victim.release()
        self._metrics.evicted(len(evicted))
        if refusal is not None:
            item.release()
            return refusal
        if not self.index.fill(key, item):
            item.release()
        self._count()
        return Status.CLOSED if self._closed else Status.OK

    def _remove(self, key: str) -> Status:
        removed = self.index.remove(key)
        if isinstance(removed, Status):
            return Status.CLOSED if self._closed else removed
        removed.release()
        self._count()
        return Status.OK

    def _count(self) -> None:
        self._metrics.holds(len(self.index) * self.memory.object_bytes)
