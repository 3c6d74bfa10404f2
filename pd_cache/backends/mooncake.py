"""MooncakeBackend: the shared pool. Objects move between staging memory and the network without another copy.

Reads run ahead: while the caller scatters one batch of chunks, the next batches are in flight, as far as staging memory allows.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

from pd_cache.backends.base import Fetched, FetchedPart, PutOutcome, Staged, StorageBackend
from pd_cache.backends.objects import TRAILER_BYTES, Damage, inspect, inspect_trailer
from pd_cache.backends.slots import FetchedObject, ObjectMemory, StagedObject, slots_of
from pd_cache.checksum import checksum
from pd_cache.config import MooncakeTier, NodeSettings
from pd_cache.epochs import EpochBook
from pd_cache.metrics import CacheMetrics, TierMetrics
from transfer.errors import Status
from transfer.ranges import ObjectRange
from transfer.staging import Pin, Quota, Slot, StagingPool
from transfer.store import GetResult, MooncakeStore, Pending

_BATCH_BYTES = 64 << 20
"""The most bytes of one transfer call: enough for full speed, yet moved in well under a second. A lease must last for three batches."""
_BATCH_KEYS = 256
_READ_AHEAD = 4
"""The most batches of one reader that are in flight or being scattered. Without `read_ahead` it is one."""
_SHARE = 8
"""The batches of all transfer threads together take at most one in this many slots. If a peer hangs, each thread and its spare hold a
batch: a quarter of the slots in each direction. Quotas bound what queued calls and waiting readers hold."""
_READS, _PUTS = 5, 4
"""How many eighths of the slots reads and puts may hold while they wait for a peer. If one direction hangs, the other still has one eighth
besides the two eighths of its own late calls. A reader whose object is damaged reads it again into a slot that no longer counts."""

_DAMAGED = frozenset({*(damage.value for damage in Damage), "other_size", Status.CHECKSUM.value})
"""Reasons to remove an object. `checksum` is that of Mooncake itself, for an object that another client wrote."""


class _ReadBatch(NamedTuple):
    keys: list[str]
    slots: deque[Slot]
    call: Pending[GetResult]
    end: float
    """The deadline for everything that concerns its keys, by `time.monotonic()`."""


class _PartBatch(NamedTuple):
    part: int
    first: int
    """The place of its first key."""
    ranges: list[ObjectRange]
    """One for each key, all in one slot."""
    slot: Slot
    call: Pending[GetResult]
    end: float


class _PartPlan:
    """Cuts payloads into parts, and the parts into batches that fit into a slot."""

    def __init__(self, keys: int, ends: Sequence[int], slot_bytes: int) -> None:
        self.alive = keys
        """The keys from this place on are not read any more."""
        self._ends = ends
        self._slot_bytes = slot_bytes
        self._part, self._first = 0, 0

    def next(self) -> tuple[int, int, list[ObjectRange]] | None:
        """Returns the part of the next batch, the place of its first key, and the range of each key; None if there are no more."""
        if self._first >= self.alive:
            self._part, self._first = self._part + 1, 0
        if self._part >= len(self._ends) or not self.alive:
            return None
        part, first = self._part, self._first
        start = self._ends[part - 1] if part else 0
        size = self._ends[part] - start + (TRAILER_BYTES if part == len(self._ends) - 1 else 0)
        count = min(max(1, self._slot_bytes // size), self.alive - first, _BATCH_KEYS)
        self._first += count
        return part, first, [ObjectRange(start, size, place * size) for place in range(count)]


class MooncakeBackend(StorageBackend):
    """Chunk objects in the pool of one Mooncake master, through one store client and one staging pool."""

    def __init__(
        self,
        settings: NodeSettings,
        payload_bytes: int,
        *,
        pin: Pin | None = None,
        reserve: int = 0,
        read_ahead: bool = True,
        metrics: TierMetrics | None = None,
    ) -> None:
        """Maps the staging memory and begins to open the store. Does not wait for the pool.

        `pin` page-locks the staging memory for a GPU. `reserve` bytes are mapped besides `transfer.staging_size`, for local
        tiers that keep objects in the same memory. With `read_ahead` the next batches are fetched while the caller works on
        the last. Raises ValueError if `transfer.staging_size` is too small for one chunk.
        """
        transfer = settings.transfer
        self.payload_bytes = payload_bytes
        self._timeouts = transfer.timeouts
        self._metrics = metrics or CacheMetrics().tier("mooncake")
        self.read_ahead = _READ_AHEAD if read_ahead else 1
        """How many batches a reader has in flight or scatters."""
        self._closed = False
        placement = next((tier for tier in settings.cache.tiers if isinstance(tier, MooncakeTier)), MooncakeTier())
        self.store = MooncakeStore(
            transfer,
            master=settings.master,
            host=settings.host,
            segment_size=settings.segment_size,
            placement=placement,
        )
        try:
            self.staging: StagingPool = self.store.staging(payload_bytes + TRAILER_BYTES, reserve=reserve, pin=pin)
        except BaseException:
            self.store.close()
            raise
        self.memory = ObjectMemory(self.staging, payload_bytes)
        # without the slots in which a local tier keeps objects
        slots = slots_of(transfer.staging_size, payload_bytes)
        self._reads = Quota(min(slots - 1, -(-_READS * slots // _SHARE)), headroom=slots // _SHARE)
        self._puts = Quota(_PUTS * slots // _SHARE, headroom=slots // _SHARE)
        per_call = min(_BATCH_KEYS, _BATCH_BYTES // max(1, payload_bytes))
        self.batch_size = max(1, min(per_call, slots // (_SHARE * transfer.threads)))

    @functools.cached_property
    def epochs(self) -> EpochBook:
        return EpochBook(self.store, timeout_s=self._timeouts.exist_ms / 1000)

    @property
    def available(self) -> bool:
        return self.store.available

    def wait_available(self, timeout: float) -> None:
        self.store.wait_open(timeout)

    def batched_contains(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        return self.store.batch_exist(list(keys), timeout=self._seconds(timeout, self._timeouts.exist_ms))

    def batched_get(
        self, keys: Sequence[str], *, payload_bytes: int | None = None, timeout: float | None = None
    ) -> Generator[Fetched, None, None]:
        size = self.memory.sized(payload_bytes)
        longest = self._timeouts.get_ms / 1000
        deadline = None if timeout is None else time.monotonic() + timeout
        ahead: deque[_ReadBatch] = deque()
        started = 0
        try:
            while started < len(keys) or ahead:
                while started < len(keys) and len(ahead) < self.read_ahead:
                    now = time.monotonic()
                    end = now + longest if deadline is None else min(now + longest, deadline)
                    # only a reader that holds no slot waits for one, so two readers never wait for each other
                    slots = self._lease(min(self.batch_size, len(keys) - started), now if ahead else end)
                    if not slots:
                        break
                    batch = list(keys[started : started + len(slots)])
                    started += len(slots)
                    # the memory and the transfer share one deadline
                    seconds = max(0.0, end - time.monotonic())
                    ahead.append(
                        _ReadBatch(batch, slots, self.store.start_get(batch, list(slots), timeout=seconds), end)
                    )
                if not ahead:
                    down = not self._closed and not self.store.available
                    reason = Status.POOL_DOWN.value if down else self.memory.refusal
                    for _ in keys[started:]:
                        yield FetchedObject(None, reason)
                    return
                batch_keys, slots, call, end = ahead[0]
                for key, result in zip(batch_keys, call.results(), strict=True):
                    yield self._fetched(key, slots.popleft(), result, size, end)
                ahead.popleft()
        finally:
            for batch_left in ahead:
                batch_left.call.abandon()
                for slot in batch_left.slots:
                    slot.release()

    @property
    def reads_parts(self) -> bool:
        return self.store.reads_ranges

    def batched_get_parts(
        self, keys: Sequence[str], ends: Sequence[int], *, timeout: float | None = None
    ) -> Generator[FetchedPart, None, None]:
        size = self.memory.sized(ends[-1])
        longest = self._timeouts.get_ms / 1000
        deadline = None if timeout is None else time.monotonic() + timeout
        plan = _PartPlan(len(keys), ends, self.staging.slot_bytes)
        ahead: deque[_PartBatch] = deque()
        read, begun = self.store.start_ranges(list(keys), timeout=longest if timeout is None else min(longest, timeout))
        try:
            for index, status in enumerate(begun.results()):
                if status is not Status.OK:
                    plan.alive = index
                    yield FetchedPart(0, index, None, status.value)
                    break
            planned = plan.next()
            while planned is not None or ahead:
                while planned is not None and len(ahead) < self.read_ahead:
                    part, first, ranges = planned
                    now = time.monotonic()
                    end = now + longest if deadline is None else min(now + longest, deadline)
                    # as in `batched_get`, only a reader that holds no slot waits for one
                    slot = self.staging.lease(now if ahead else end, self._reads)
                    if slot is None:
                        break
                    some, seconds = list(keys[first : first + len(ranges)]), max(0.0, end - time.monotonic())
                    call = self.store.start_get_range(read, some, slot, ranges, timeout=seconds)
                    ahead.append(_PartBatch(part, first, ranges, slot, call, end))
                    planned = plan.next()
                if not ahead:
                    assert planned is not None
                    down = not self._closed and not self.store.available
                    yield FetchedPart(planned[0], 0, None, Status.POOL_DOWN.value if down else self.memory.refusal)
                    return
                batch = ahead[0]
                for place, result in enumerate(batch.call.results()):
                    index = batch.first + place
                    if index >= plan.alive:
                        break
                    last = batch.part == len(ends) - 1
                    fetched = self._fetched_part(keys[index], batch, place, result, size if last else None)
                    if isinstance(fetched, str):
                        plan.alive = index
                        if fetched in _DAMAGED:
                            self._reexamine(keys[index], fetched, size, batch.end)
                        yield FetchedPart(batch.part, index, None, fetched)
                        break
                    yield fetched._replace(place=index)
                ahead.popleft().slot.release()
                if planned is not None and planned[1] >= plan.alive:
                    planned = plan.next()
        finally:
            for left in ahead:
                left.call.abandon()
                left.slot.release()
            read.close()

    def _fetched_part(
        self, key: str, batch: _PartBatch, place: int, result: GetResult, size: int | None
    ) -> FetchedPart | str:
        """Returns a part, or the reason why it cannot be used. `size` is that of the payload if its last part is in the batch."""
        one = batch.ranges[place]
        if result.status is not Status.OK:
            return "other_size" if result.status is Status.INVALID else result.status.value
        if result.size != one.size:
            return Damage.TRUNCATED.value
        batch.slot.settle()
        view = batch.slot.view[one.place : one.place + one.size]
        if size is None:
            return FetchedPart(batch.part, 0, view)
        found = inspect_trailer(key, view[-TRAILER_BYTES:], size)
        if isinstance(found, Damage):
            return found.value
        end = batch.end

        def check(payload_checksum: int) -> str:
            if payload_checksum == found:
                return ""
            self._reexamine(key, Damage.CORRUPT.value, size, end)
            return Damage.CORRUPT.value

        return FetchedPart(batch.part, 0, view[:-TRAILER_BYTES], check=check)

    def _reexamine(self, key: str, reason: str, size: int, end: float) -> None:
        """Removes an object that was damaged when it was read in parts, if it still is. Does nothing if no memory is free: this reader has
        some, and must not wait for more."""
        slot = self.staging.try_lease(self._reads)
        if slot is not None:
            try:
                self._look_again(key, slot, reason, size, end)
            finally:
                slot.release()

    def stage(self, *, payload_bytes: int | None = None, timeout: float | None = None) -> Staged | None:
        return self.memory.stage(self._seconds(timeout, self._timeouts.put_ms), self._puts, payload_bytes=payload_bytes)

    def batched_put(self, keys: Sequence[str], staged: Sequence[Staged], *, timeout: float | None = None) -> PutOutcome:
        items = self.memory.own(staged, keys)
        try:
            sizes = [item.seal(key) for key, item in zip(keys, items, strict=True)]
            seconds = self._seconds(timeout, self._timeouts.put_ms)
            return self.store.start_put(list(keys), [item.slot for item in items], sizes, timeout=seconds)
        finally:
            # the call in flight holds its own references
            for item in items:
                item.release()

    def batched_remove(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        if self._closed:
            return [Status.CLOSED] * len(keys)
        return self.store.remove(list(keys), timeout=self._seconds(timeout, self._timeouts.exist_ms))

    def annotate(self, key: str, value: bytes, *, timeout: float | None = None) -> Status:
        if self._closed:
            return Status.CLOSED
        return self.store.put_small(key, value, timeout=self._seconds(timeout, self._timeouts.exist_ms))

    def close(self) -> None:
        self._closed = True
        self.store.close()
        self.staging.close()

    def _seconds(self, timeout: float | None, default_ms: int) -> float:
        return default_ms / 1000 if timeout is None else timeout

    def _lease(self, count: int, deadline: float) -> deque[Slot]:
        """Returns up to `count` slots. Waits for the first until `deadline`, and takes the others only if they are free."""
        slots: deque[Slot] = deque()
        first = self.staging.lease(deadline, self._reads)
        while first is not None and len(slots) < count:
            slots.append(first)
            first = self.staging.try_lease(self._reads) if len(slots) < count else None
        return slots

    def _fetched(self, key: str, slot: Slot, result: GetResult, size: int, end: float) -> Fetched:
        """Returns a key's outcome. Takes over its slot."""
        found = self._object(key, slot, result, size)
        if found in _DAMAGED:
            found = self._look_again(key, slot, str(found), size, end)
        if isinstance(found, str):
            slot.release()
            return FetchedObject(None, found)
        slot.settle()  # its peer has delivered, so it leaves the quota
        fetched = FetchedObject(StagedObject(self.memory, slot, size, key), expected=found)

        def checked(one: FetchedObject) -> None:
            if one.reason:
                self._look_again(key, slot, one.reason, size, end)

        fetched.when_checked(checked)
        return fetched

    def _object(self, key: str, slot: Slot, result: GetResult, size: int) -> str | int:
        """Returns the reason why a slot does not hold an object of `key` after a read, or the checksum that its payload must have."""
        if result.status is Status.OK:
            found = inspect(key, slot.view[: result.size], size)
            return found.value if isinstance(found, Damage) else found
        # Mooncake refuses to read an object larger than the slot; a chunk of this namespace would fit
        return "other_size" if result.status is Status.INVALID else result.status.value

    def _look_again(self, key: str, slot: Slot, reason: str, size: int, end: float) -> str | int:
        """Reads a damaged object a second time, and removes it if it is still damaged in the same way, so that its next writer replaces it.

        Returns what `_object` does, with the first `reason` if the object is still of no use.

        Another reader may have found the damage, and a writer may have replaced the object. Mooncake has no conditional removal, so a
        replacement that comes after the second read is removed, too. That costs a miss.
        """
        result = self.store.start_get([key], [slot], timeout=max(0.0, end - time.monotonic())).results()[0]
        found = self._object(key, slot, result, size)
        if isinstance(found, int) and checksum(slot.view[:size]) != found:
            found = Damage.CORRUPT.value
        # a part that an object is too short for cannot be told from one that Mooncake refused for another reason
        if found == reason or (reason == "other_size" and found in _DAMAGED):
            self._heal(key, end)
        return reason if isinstance(found, str) else found

    def _heal(self, key: str, end: float) -> None:
        """Removes a damaged object by force: each lookup renews its lease, which would keep it as long as its prompt is looked up."""
        seconds = min(self._timeouts.exist_ms / 1000, end - time.monotonic())
        if seconds > 0 and self.store.remove([key], timeout=seconds, force=True) == [Status.OK]:
            self._metrics.healed()
