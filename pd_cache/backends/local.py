"""LocalBackend: objects in this process's memory, on the host or on a GPU.

On the host nothing is copied: an entry is a reference to the slot that its object lies in (see `memory.py`), and a reader
gets the slot itself. On a device each entry has a place in one slab there, and bytes are copied in and out.

Entries are of one size, so that memory cannot fragment. An entry that is being read is pinned, and never evicted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Generic, Protocol, TypeVar

from pd_cache.backends.base import Fetched, PutOutcome, Settled, Staged, StorageBackend
from pd_cache.backends.eviction import PolicyName, make_policy
from pd_cache.backends.index import Entry, EvictingIndex, Removal, Room
from pd_cache.backends.memory import FetchedObject, ObjectMemory, StagedObject, slots_of
from pd_cache.backends.objects import inspect
from pd_cache.metrics import TierMetrics
from transfer.errors import Status
from transfer.settings import Timeouts

log = logging.getLogger(__name__)

H = TypeVar("H")

_BATCH_BYTES = 64 << 20


class Shelf(Protocol[H]):
    """Keeps the bytes of entries."""

    def keep(self, staged: StagedObject) -> H | None:
        """Keep a sealed object, and take over its reference. Returns None if there is no room after all."""

    def show(self, held: H, key: str, deadline: float) -> StagedObject | None:
        """Returns the object in memory that a reader may use until it releases it; None if no memory came free in time."""

    def drop(self, held: H) -> None:
        """To be called when nobody needs the object any more."""

    def close(self) -> None:
        """Let go of the device's memory."""


class HostShelf:
    """Keeps objects in the slots they came in."""

    def keep(self, staged: StagedObject) -> StagedObject:
        return staged

    def show(self, held: StagedObject, key: str, deadline: float) -> StagedObject | None:
        return held.share()

    def drop(self, held: StagedObject) -> None:
        held.release()

    def close(self) -> None:
        return


class DeviceShelf:
    """Keeps objects in one slab on a device. Each copy waits until its bytes have arrived."""

    def __init__(self, memory: ObjectMemory, places: int, device: str) -> None:
        """Allocate `places` objects' worth on `device`, as torch names it. RuntimeError where torch cannot."""
        import torch

        self._memory = memory
        self._view: Callable[[memoryview], torch.Tensor] = lambda view: torch.frombuffer(view, dtype=torch.uint8)
        self._slab: torch.Tensor | None = torch.empty((places, memory.object_bytes), dtype=torch.uint8, device=device)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(places):
            self._free.put(place)

    def keep(self, staged: StagedObject) -> int | None:
        with contextlib.ExitStack() as undo:
            undo.callback(staged.release)
            slab = self._slab
            if slab is None:
                return None
            try:
                place = self._free.get_nowait()
            except queue.Empty:  # another thread took an entry out and is about to drop its place
                return None
            undo.callback(self._free.put, place)
            slab[place].copy_(self._view(staged.slot.view[: self._memory.object_bytes]))
            undo.pop_all()
        staged.release()
        return place

    def show(self, held: int, key: str, deadline: float) -> StagedObject | None:
        slab = self._slab
        staged = None if slab is None else self._memory.stage(max(0.0, deadline - time.monotonic()))
        if slab is None or staged is None:
            return None
        try:
            self._view(staged.slot.view[: self._memory.object_bytes]).copy_(slab[held])
        except BaseException:
            staged.release()
            raise
        staged.sealed_for = key
        return staged

    def drop(self, held: int) -> None:
        self._free.put(held)

    def close(self) -> None:
        self._slab = None


class LocalBackend(StorageBackend, Generic[H]):
    """Keeps objects in memory, within a byte budget, by an eviction policy."""

    settles_at_once = True

    def __init__(
        self,
        memory: ObjectMemory,
        shelf: Shelf[H],
        capacity: int,
        policy: PolicyName,
        timeouts: Timeouts,
        metrics: TierMetrics,
    ) -> None:
        """Keep at most `capacity` objects on `shelf`."""
        self.memory = memory
        self._timeouts = timeouts
        self.payload_bytes = memory.payload_bytes
        self.batch_size = max(1, min(memory.pool.slots // 4, _BATCH_BYTES // max(1, self.payload_bytes)))
        self.index: EvictingIndex[H] = EvictingIndex(capacity, make_policy(policy, capacity))
        self._shelf = shelf
        self._metrics = metrics
        self._closed = False
        self._held: dict[str, list[Entry[H]]] = {}
        """The entries that `pin` keeps, and how often each is pinned."""
        self._holding = threading.Lock()
        if not capacity:
            log.warning("tier %s holds nothing: its capacity is less than one object", metrics.tier)

    @property
    def available(self) -> bool:
        return not self._closed

    def wait_available(self, timeout: float) -> None:
        return

    def batched_contains(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        if self._closed:
            return [Status.CLOSED] * len(keys)
        return [Status.OK if found else Status.MISSING for found in self.index.contains(keys)]

    def batched_get(self, keys: Sequence[str], *, timeout: float | None = None) -> Generator[Fetched, None, None]:
        entries: list[Entry[H] | None] = []
        served = 0
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            # all at once, so that what is there now is not evicted by what this reader brings in
            for key in keys:
                entries.append(self.index.pin(key))
            for key, entry in zip(keys, entries, strict=True):
                served += 1
                yield self._missing() if entry is None else self._read(key, entry, deadline)
        finally:
            for left in entries[served:]:
                if left is not None:
                    self._unpin(left)

    def stage(self, *, timeout: float | None = None) -> Staged | None:
        return self.memory.stage(self._timeouts.put_ms / 1000 if timeout is None else timeout)

    def batched_put(self, keys: Sequence[str], staged: Sequence[Staged], *, timeout: float | None = None) -> PutOutcome:
        items = self.memory.own(staged, keys)
        return Settled([self._put(key, item) for key, item in zip(keys, items, strict=True)])

    def batched_remove(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        return [self._remove(key) for key in keys]

    def pin(self, keys: Sequence[str]) -> Sequence[str]:
        """Pins at most half of the entries; the others stay for new objects."""
        pinned = []
        with self._holding:
            for key in keys:
                room = key in self._held or len(self._held) < self.index.capacity // 2
                entry = self.index.pin(key) if room and not self._closed else None
                if entry is not None:
                    self._held.setdefault(key, []).append(entry)
                    pinned.append(key)
        return pinned

    def unpin(self, keys: Sequence[str]) -> None:
        with self._holding:
            for key in keys:
                if entries := self._held.get(key):
                    self._unpin(entries.pop())
                    if not entries:
                        del self._held[key]

    def annotate(self, key: str, value: bytes, *, timeout: float | None = None) -> Status:
        return Status.CLOSED if self._closed else Status.OK  # nobody looks for notes in memory

    def close(self) -> None:
        self._closed = True
        with self._holding:
            held_by_pins, self._held = self._held, {}
        for entries in held_by_pins.values():
            for entry in entries:
                self._unpin(entry)
        for held in self.index.close():
            self._shelf.drop(held)
        self._shelf.close()
        self.memory.close()

    def _missing(self) -> Fetched:
        return FetchedObject(None, (Status.CLOSED if self._closed else Status.MISSING).value)

    def _read(self, key: str, entry: Entry[H], deadline: float | None) -> Fetched:
        latest = time.monotonic() + self._timeouts.get_ms / 1000
        with contextlib.ExitStack() as undo:  # the entry does not stay pinned if this is interrupted
            undo.callback(self._unpin, entry)
            staged = self._shelf.show(entry.resource, key, latest if deadline is None else min(latest, deadline))
            if staged is None:
                return FetchedObject(None, self.memory.refusal)
            undo.callback(staged.release)
            damage = inspect(key, staged.slot.view[: self.memory.object_bytes], self.payload_bytes)
            if damage is None:
                undo.pop_all()
                return FetchedObject(staged, on_release=lambda: self._unpin(entry))
            self.index.discard(entry)
        self._count()
        self._metrics.healed()
        return FetchedObject(None, damage.value)

    def _unpin(self, entry: Entry[H]) -> None:
        if self.index.unpin(entry):
            self._shelf.drop(entry.resource)

    def _put(self, key: str, item: StagedObject) -> Status:
        room, evicted = self.index.reserve(key)
        for held in evicted:
            self._shelf.drop(held)
        self._metrics.evicted(len(evicted))
        if room is not Room.RESERVED:
            item.release()
            return Status.OK if room is Room.PRESENT else self._refused()
        with contextlib.ExitStack() as undo:  # a failing device raises
            undo.callback(self.index.cancel)
            undo.callback(item.release)
            item.seal(key)
            kept = self._shelf.keep(item)
            if kept is None:
                return self._refused()
            undo.pop_all()
        if not self.index.fill(key, kept):
            self._shelf.drop(kept)
        self._count()
        return Status.CLOSED if self._closed else Status.OK

    def _refused(self) -> Status:
        return Status.CLOSED if self._closed else Status.NO_SPACE

    def _remove(self, key: str) -> Status:
        removal, held = self.index.remove(key)
        if removal is Removal.REMOVED:
            self._shelf.drop(held)  # type: ignore[arg-type]  # there is one where something was removed
            self._count()
            return Status.OK
        if self._closed:
            return Status.CLOSED
        return Status.BUSY if removal is Removal.PINNED else Status.MISSING

    def _count(self) -> None:
        self._metrics.holds(len(self.index) * self.memory.object_bytes)


def open_local(
    memory: ObjectMemory,
    capacity: int,
    policy: PolicyName,
    timeouts: Timeouts,
    metrics: TierMetrics,
    *,
    device: str = "cpu",
) -> StorageBackend:
    """A local tier of `capacity` bytes. On the CPU they lie in `memory`, which must have slots to spare for them."""
    if device == "cpu":
        return LocalBackend(memory, HostShelf(), slots_of(capacity, memory.payload_bytes), policy, timeouts, metrics)
    places = capacity // memory.object_bytes
    return LocalBackend(memory, DeviceShelf(memory, places, device), places, policy, timeouts, metrics)
