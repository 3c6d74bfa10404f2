"""LocalBackend: keeps objects in this process's memory, on the host or on a GPU.

On the host nothing is copied: an entry is a reference to the slot that its object lies in (see `slots.py`), and a reader
gets the slot itself. On a device each entry has a row in one slab there, and bytes are copied in and out.

Each entry takes a whole slot or row, so memory cannot fragment. An entry that is being read is pinned, and never evicted.

All of this runs on the caller's thread, which a user may interrupt. So slots, rows, pins and reserved places are objects: they come
back when nothing refers to them any more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Generic, Protocol, TypeVar

from pd_cache.backends.base import Fetched, PutOutcome, Settled, Staged, StorageBackend
from pd_cache.backends.eviction import make_policy
from pd_cache.backends.index import EvictingIndex, Pin, Removal, Room
from pd_cache.backends.objects import Damage, inspect
from pd_cache.backends.slots import FetchedObject, ObjectMemory, StagedObject, slots_of
from pd_cache.config import EvictionName
from pd_cache.metrics import TierMetrics
from transfer.errors import Status
from transfer.settings import Timeouts

log = logging.getLogger(__name__)

H = TypeVar("H")

_BATCH_BYTES = 64 << 20


class Shelf(Protocol[H]):
    """Keeps the bytes of entries."""

    def keep(self, staged: StagedObject) -> H | None:
        """Keeps a sealed object, and takes over its reference. Returns None if there is no room after all."""

    def show(self, resource: H, key: str, deadline: float) -> StagedObject | None:
        """Returns the object in host memory, until the reader releases it; None if no memory came free in time."""

    def drop(self, resource: H) -> None:
        """Gives up the object. Idempotent."""

    def close(self) -> None:
        """Lets go of the device's memory."""


class HostShelf:
    """Keeps objects in the slots they came in."""

    def keep(self, staged: StagedObject) -> StagedObject:
        return staged

    def show(self, resource: StagedObject, key: str, deadline: float) -> StagedObject | None:
        return resource.share()

    def drop(self, resource: StagedObject) -> None:
        resource.release()

    def close(self) -> None:
        return


class Row:
    """A row of a device's slab, taken until `drop`, or until nothing refers to this object any more."""

    __slots__ = ("__weakref__", "number", "payload_bytes")

    def __init__(self, number: int, payload_bytes: int) -> None:
        self.number = number
        self.payload_bytes = payload_bytes


class DeviceShelf:
    """Keeps objects in one slab on a device. Copies are synchronous."""

    def __init__(self, memory: ObjectMemory, places: int, device: str) -> None:
        """Allocates memory for `places` objects on `device`, as torch names it. Raises RuntimeError if torch cannot."""
        import torch

        self._memory = memory
        self._view: Callable[[memoryview], torch.Tensor] = lambda view: torch.frombuffer(view, dtype=torch.uint8)
        self._slab: torch.Tensor | None = torch.empty((places, memory.object_bytes), dtype=torch.uint8, device=device)
        self._lock = threading.Lock()
        self._free = list(range(places))
        self._taken: dict[int, weakref.ref[Row]] = {}
        """For each row that is taken, its `Row`."""

    def keep(self, staged: StagedObject) -> Row | None:
        try:
            slab = self._slab
            row = None if slab is None else self._take(len(staged.payload))
            if slab is None or row is None:
                return None
            try:
                size = staged.object_bytes
                slab[row.number][:size].copy_(self._view(staged.slot.view[:size]))
            except BaseException:
                self.drop(row)
                raise
            return row
        finally:
            staged.release()

    def show(self, resource: Row, key: str, deadline: float) -> StagedObject | None:
        slab = self._slab
        seconds = max(0.0, deadline - time.monotonic())
        staged = None if slab is None else self._memory.stage(seconds, payload_bytes=resource.payload_bytes)
        if slab is None or staged is None:
            return None
        try:
            size = staged.object_bytes
            self._view(staged.slot.view[:size]).copy_(slab[resource.number][:size])
        except BaseException:
            staged.release()
            raise
        staged.sealed_for = key
        return staged

    def drop(self, resource: Row) -> None:
        with self._lock:
            if self._holder(resource.number) is resource:
                del self._taken[resource.number]
                self._free.append(resource.number)

    def close(self) -> None:
        self._slab = None

    def _take(self, payload_bytes: int) -> Row | None:
        """Returns a row. Returns None if none is free, because another thread evicted an entry and has not dropped its row yet."""
        with self._lock:
            if not self._free:
                places = range(0 if self._slab is None else len(self._slab))
                self._free = [number for number in places if self._holder(number) is None]
            if not self._free:
                return None
            # in this order, an interrupt between any two steps neither loses a row nor hands it out twice
            row = Row(self._free[-1], payload_bytes)
            self._taken[row.number] = weakref.ref(row)
            self._free.pop()
            return row

    def _holder(self, number: int) -> Row | None:
        reference = self._taken.get(number)
        return None if reference is None else reference()


class LocalBackend(StorageBackend, Generic[H]):
    """Keeps objects in memory, within a byte budget, by an eviction policy."""

    settles_at_once = True
    tier = "memory"

    def __init__(
        self,
        memory: ObjectMemory,
        shelf: Shelf[H],
        capacity: int,
        policy: EvictionName,
        timeouts: Timeouts,
        metrics: TierMetrics,
    ) -> None:
        """Keeps at most `capacity` objects on `shelf`."""
        self.memory = memory
        self._timeouts = timeouts
        self.payload_bytes = memory.payload_bytes
        self.batch_size = max(1, min(memory.pool.slots // 4, _BATCH_BYTES // max(1, self.payload_bytes)))
        self.index: EvictingIndex[H] = EvictingIndex(capacity, make_policy(policy, capacity))
        self._shelf = shelf
        self._metrics = metrics
        self._closed = False
        self._kept_pins: dict[str, list[Pin[H]]] = {}
        """The pins that `pin` took, by key."""
        self._holding = threading.Lock()
        if not capacity:
            log.warning("tier %s holds nothing: its capacity is smaller than one object", metrics.tier)

    @property
    def available(self) -> bool:
        return not self._closed

    def wait_available(self, timeout: float) -> None:
        return

    def batched_contains(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        if self._closed:
            return [Status.CLOSED] * len(keys)
        return [Status.OK if found else Status.MISSING for found in self.index.contains(keys)]

    def batched_get(
        self, keys: Sequence[str], *, payload_bytes: int | None = None, timeout: float | None = None
    ) -> Generator[Fetched, None, None]:
        size = self.memory.read_size(payload_bytes)
        pins: list[Pin[H] | None] = []
        served = 0
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            # all at once, so that what this reader brings in does not evict what it is about to read
            for key in keys:
                pins.append(self.index.pin(key))
            for key, pin in zip(keys, pins, strict=True):
                pins[served] = None  # from now on the outcome holds it
                served += 1
                yield self._missing() if pin is None else self._read(key, pin, size, deadline)
        finally:
            for left in pins[served:]:
                if left is not None:
                    self._unpin(left)

    def stage(self, *, payload_bytes: int | None = None, timeout: float | None = None) -> Staged | None:
        return self.memory.stage(
            self._timeouts.put_ms / 1000 if timeout is None else timeout, payload_bytes=payload_bytes
        )

    def batched_put(self, keys: Sequence[str], staged: Sequence[Staged], *, timeout: float | None = None) -> PutOutcome:
        items = self.memory.own(staged, keys)
        return Settled([self._put(key, item) for key, item in zip(keys, items, strict=True)])

    def batched_remove(self, keys: Sequence[str], *, timeout: float | None = None, force: bool = False) -> list[Status]:
        return [self._remove(key) for key in keys]

    def pin(self, keys: Sequence[str]) -> Sequence[str]:
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

    def unpin(self, keys: Sequence[str]) -> None:
        with self._holding:
            for key in keys:
                if pins := self._kept_pins.get(key):
                    self._unpin(pins.pop())
                    if not pins:
                        del self._kept_pins[key]

    def annotate(self, key: str, value: bytes, *, timeout: float | None = None) -> Status:
        return Status.CLOSED if self._closed else Status.OK  # nobody would read a note in memory

    def close(self) -> None:
        self._closed = True
        with self._holding:
            kept, self._kept_pins = self._kept_pins, {}
        for pins in kept.values():
            for pin in pins:
                self._unpin(pin)
        for resource in self.index.close():
            self._shelf.drop(resource)
        self._shelf.close()
        self.memory.close()

    def _missing(self) -> Fetched:
        return FetchedObject(None, (Status.CLOSED if self._closed else Status.MISSING).value)

    def _read(self, key: str, pin: Pin[H], size: int, deadline: float | None) -> Fetched:
        latest = time.monotonic() + self._timeouts.get_ms / 1000
        with contextlib.ExitStack() as undo:  # a failing device raises
            undo.callback(self._unpin, pin)
            staged = self._shelf.show(pin.entry.resource, key, latest if deadline is None else min(latest, deadline))
            if staged is None:
                return FetchedObject(None, self.memory.refusal)
            undo.callback(staged.release)
            found = inspect(key, staged.slot.view[: staged.object_bytes], size)
            if not isinstance(found, Damage):
                undo.pop_all()
                fetched = FetchedObject(staged, expected=found, on_release=lambda: self._unpin(pin))
                fetched.tier = self.tier
                fetched.when_checked(lambda one: self._checked(pin, one))
                return fetched
            self._discard(pin)
        return FetchedObject(None, found.value)

    def _checked(self, pin: Pin[H], fetched: FetchedObject) -> None:
        pin.entry.failures = pin.entry.failures + 1 if fetched.reason else 0
        if pin.entry.damaged:
            self._discard(pin)

    def _discard(self, pin: Pin[H]) -> None:
        """Forgets a damaged object."""
        self.index.discard(pin.entry)
        self._count()
        self._metrics.healed()

    def _unpin(self, pin: Pin[H]) -> None:
        if self.index.unpin(pin):
            self._shelf.drop(pin.entry.resource)

    def _put(self, key: str, item: StagedObject) -> Status:
        room, evicted, place = self.index.reserve(key)
        for resource in evicted:
            self._shelf.drop(resource)
        self._metrics.evicted(len(evicted))
        if place is None:
            item.release()
            return Status.OK if room is Room.PRESENT else self._refused()
        with contextlib.ExitStack() as undo:  # a failing device raises
            undo.callback(place.release)
            undo.callback(item.release)
            item.seal(key)
            kept = self._shelf.keep(item)
            if kept is None:
                return self._refused()
            undo.pop_all()
        if not self.index.fill(place, key, kept):
            self._shelf.drop(kept)
        self._count()
        return Status.CLOSED if self._closed else Status.OK

    def _refused(self) -> Status:
        return Status.CLOSED if self._closed else Status.NO_SPACE

    def _remove(self, key: str) -> Status:
        removal = self.index.remove(key, self._shelf.drop)
        if removal is Removal.REMOVED:
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
    policy: EvictionName,
    timeouts: Timeouts,
    metrics: TierMetrics,
    *,
    device: str = "cpu",
) -> StorageBackend:
    """Returns a local tier of `capacity` bytes. On the CPU they lie in `memory`, which must have slots to spare for them."""
    if device == "cpu":
        return LocalBackend(memory, HostShelf(), slots_of(capacity, memory.payload_bytes), policy, timeouts, metrics)
    places = capacity // memory.object_bytes
    return LocalBackend(memory, DeviceShelf(memory, places, device), places, policy, timeouts, metrics)
