"""LocalBackend: keeps objects in this process's memory, on the host or on a GPU.

On the host nothing is copied: an entry is a reference to the slot that its object lies in (`memory.py`), and a reader
gets the slot itself. On a device each entry has a row in one slab there, and bytes are copied in and out.

Each entry takes a whole slot or row, so memory cannot fragment. An entry that is being read is pinned, and never evicted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from pd_cache.config import EvictionName, LocalTier
from pd_cache.metrics import TierMetrics
from pd_cache.tiers.base import PutOutcome, Settled, StorageBackend
from pd_cache.tiers.index import Entry, EvictingIndex
from pd_cache.tiers.memory import Damage, Fetched, ObjectMemory, Staged, inspect, slots_of
from transfer.errors import Status
from transfer.settings import Timeouts

log = logging.getLogger(__name__)

_BATCH_BYTES = 64 << 20


class LocalBackend(StorageBackend):
    """Keeps objects in the slots that they came in, within a byte budget, by an eviction policy.

    A subclass that keeps them elsewhere overrides `_keep`, `_show` and `_drop`.
    """

    settles_at_once = True
    tier = "memory"

    def __init__(
        self,
        memory: ObjectMemory,
        capacity: int,
        policy: EvictionName,
        timeouts: Timeouts,
        metrics: TierMetrics,
    ) -> None:
        """Keeps at most `capacity` objects."""
        self.memory = memory
        self._timeouts = timeouts
        self.payload_bytes = memory.payload_bytes
        self.batch_size = max(1, min(memory.pool.slots // 4, _BATCH_BYTES // max(1, self.payload_bytes)))
        self.index: EvictingIndex[Any] = EvictingIndex(capacity, policy)
        self._metrics = metrics
        self._closed = False
        self._kept_pins: dict[str, list[Entry[Any]]] = {}
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
        pins: list[Entry[Any] | None] = []  # as many as `served` belong to outcomes
        served = 0
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            # all at once, so that what this reader brings in does not evict what it is about to read
            for key in keys:
                pins.append(self.index.pin(key))
            for key, pin in zip(keys, pins, strict=True):
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
        statuses: list[Status] = []
        try:
            for key, item in zip(keys, items, strict=True):
                statuses.append(self._put(key, item))
        finally:
            for item in items[len(statuses) :]:
                item.release()
        return Settled(statuses)

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
            self._drop(resource)
        self.memory.close()

    def _missing(self) -> Fetched:
        return Fetched(None, (Status.CLOSED if self._closed else Status.MISSING).value)

    def _read(self, key: str, entry: Entry[Any], size: int, deadline: float | None) -> Fetched:
        latest = time.monotonic() + self._timeouts.get_ms / 1000
        with contextlib.ExitStack() as undo:  # a failing device raises
            undo.callback(self._unpin, entry)
            staged = self._show(entry.resource, key, latest if deadline is None else min(latest, deadline))
            if staged is None:
                return Fetched(None, self.memory.refusal)
            undo.callback(staged.release)
            found = inspect(key, staged.slot.view[: staged.object_bytes], size)
            if not isinstance(found, Damage):
                undo.pop_all()
                fetched = Fetched(staged, expected=found, on_release=lambda: self._unpin(entry))
                fetched.tier = self.tier
                fetched.when_checked(lambda one: self._checked(entry, one))
                return fetched
            self._discard(entry)
        return Fetched(None, found.value)

    def _checked(self, entry: Entry[Any], fetched: Fetched) -> None:
        entry.failures = entry.failures + 1 if fetched.reason else 0
        if entry.damaged:
            self._discard(entry)

    def _discard(self, entry: Entry[Any]) -> None:
        """Forgets a damaged object."""
        self.index.discard(entry)
        self._count()
        self._metrics.healed()

    def _unpin(self, entry: Entry[Any]) -> None:
        if self.index.unpin(entry):
            self._drop(entry.resource)

    def _put(self, key: str, item: Staged) -> Status:
        refusal, evicted = self.index.reserve(key)
        for resource in evicted:
            self._drop(resource)
        self._metrics.evicted(len(evicted))
        if refusal is not None:
            item.release()
            return refusal
        with contextlib.ExitStack() as undo:  # a failing device raises
            undo.callback(self.index.unreserve)
            undo.callback(item.release)
            item.seal(key)
            kept = self._keep(item)
            if kept is None:
                return Status.CLOSED if self._closed else Status.NO_SPACE
            undo.pop_all()
        if not self.index.fill(key, kept):
            self._drop(kept)
        self._count()
        return Status.CLOSED if self._closed else Status.OK

    def _remove(self, key: str) -> Status:
        removed = self.index.remove(key)
        if isinstance(removed, Status):
            return Status.CLOSED if self._closed else removed
        self._drop(removed)
        self._count()
        return Status.OK

    def _count(self) -> None:
        self._metrics.holds(len(self.index) * self.memory.object_bytes)

    # --- where the bytes are -------------------------------------------------------------------------------------

    def _keep(self, staged: Staged) -> Any:
        """Keeps a sealed object, and takes over its reference. Returns what says where it is; None if there is no room after all."""
        return staged

    def _show(self, resource: Any, key: str, deadline: float) -> Staged | None:
        """Returns the object in host memory, until the reader releases it; None if no memory came free in time."""
        kept: Staged = resource
        return kept.share()

    def _drop(self, resource: Any) -> None:
        """Gives up the object."""
        resource.release()


class Row(NamedTuple):
    """A row of a device's slab."""

    number: int
    payload_bytes: int


class DeviceBackend(LocalBackend):
    """Keeps objects in one slab on a device. Copies are synchronous."""

    def __init__(
        self,
        memory: ObjectMemory,
        capacity: int,
        policy: EvictionName,
        timeouts: Timeouts,
        metrics: TierMetrics,
        *,
        device: str,
    ) -> None:
        """Allocates memory for `capacity` objects on `device`, as torch names it. Raises RuntimeError if torch cannot."""
        import torch

        super().__init__(memory, capacity, policy, timeouts, metrics)
        self.view: Callable[[memoryview], torch.Tensor] = lambda view: torch.frombuffer(view, dtype=torch.uint8)
        self.slab: torch.Tensor | None = torch.empty((capacity, memory.object_bytes), dtype=torch.uint8, device=device)
        self._lock = threading.Lock()
        self._free = list(range(capacity))

    def close(self) -> None:
        super().close()
        self.slab = None

    def _keep(self, staged: Staged) -> Row | None:
        try:
            slab, row = self.slab, None
            with self._lock:
                # another thread may have evicted an entry and not dropped its row yet
                if slab is not None and self._free:
                    row = Row(self._free.pop(), len(staged.payload))
            if slab is None or row is None:
                return None
            try:
                size = staged.object_bytes
                slab[row.number][:size].copy_(self.view(staged.slot.view[:size]))
            except BaseException:
                self._drop(row)
                raise
            return row
        finally:
            staged.release()

    def _show(self, resource: Row, key: str, deadline: float) -> Staged | None:
        slab = self.slab
        seconds = max(0.0, deadline - time.monotonic())
        staged = None if slab is None else self.memory.stage(seconds, payload_bytes=resource.payload_bytes)
        if slab is None or staged is None:
            return None
        try:
            size = staged.object_bytes
            self.view(staged.slot.view[:size]).copy_(slab[resource.number][:size])
        except BaseException:
            staged.release()
            raise
        staged.sealed_for = key
        return staged

    def _drop(self, resource: Row) -> None:
        with self._lock:
            self._free.append(resource.number)


def open_local(memory: ObjectMemory, tier: LocalTier, timeouts: Timeouts, metrics: TierMetrics) -> LocalBackend:
    """Returns a local tier. On the CPU its objects lie in `memory`, which must have slots to spare for them."""
    if tier.device == "cpu":
        return LocalBackend(memory, slots_of(tier.capacity, memory.payload_bytes), tier.policy, timeouts, metrics)
    places = tier.capacity // memory.object_bytes
    return DeviceBackend(memory, places, tier.policy, timeouts, metrics, device=tier.device)
