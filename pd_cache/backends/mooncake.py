"""MooncakeBackend: the shared pool. Objects go from staging memory to the network and back without another copy.

Reads run ahead: while the caller scatters one batch of chunks, the next ones are in flight, as far as staging reaches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

from pd_cache.backends.base import Fetched, PutOutcome, Staged, StorageBackend
from pd_cache.backends.objects import TRAILER_BYTES, inspect, seal
from pd_cache.config import MooncakeTier, NodeSettings
from transfer.errors import Status
from transfer.staging import Pin, Slot, StagingPool
from transfer.store import GetResult, MooncakeStore, Pending

_BATCH_BYTES = 64 << 20
"""Of one transfer call: large enough for full speed, and well below the second that a lease must outlast thrice."""
_BATCH_KEYS = 256
_READ_AHEAD = 4
"""Batches in flight or being scattered."""


class _StagedSlot:
    """A slot that the caller fills."""

    __slots__ = ("payload", "slot")

    def __init__(self, slot: Slot, payload_bytes: int) -> None:
        self.slot = slot
        self.payload = slot.view[:payload_bytes]

    def release(self) -> None:
        self.slot.release()


class _FetchedSlot:
    """A slot with a checked payload."""

    __slots__ = ("_slot", "payload", "reason")

    def __init__(self, slot: Slot | None, payload: memoryview | None, reason: str) -> None:
        self._slot = slot
        self.payload = payload
        self.reason = reason

    def release(self) -> None:
        slot, self._slot, self.payload = self._slot, None, None
        if slot is not None:
            slot.release()


class _Batch(NamedTuple):
    keys: list[str]
    slots: deque[Slot]
    call: Pending[GetResult]


class _Refused:
    """A put that never started."""

    def __init__(self, statuses: list[Status]) -> None:
        self._statuses = statuses

    def results(self) -> list[Status]:
        return self._statuses


class MooncakeBackend(StorageBackend):
    """Chunk objects in the pool of one Mooncake master, through one store client and one staging pool."""

    def __init__(self, settings: NodeSettings, payload_bytes: int, *, pin: Pin | None = None) -> None:
        """Map the staging memory and begin to open the store; does not wait for the pool.

        `pin` page-locks the staging memory for a GPU. ValueError if `transfer.staging_size` holds no chunk.
        """
        transfer = settings.transfer
        self.payload_bytes = payload_bytes
        self._timeouts = transfer.timeouts
        placement = next((tier for tier in settings.cache.tiers if isinstance(tier, MooncakeTier)), MooncakeTier())
        self.store = MooncakeStore(
            transfer,
            master=settings.master,
            host=settings.host,
            segment_size=settings.segment_size,
            placement=placement,
        )
        try:
            self.staging: StagingPool = self.store.staging(payload_bytes + TRAILER_BYTES, pin=pin)
        except BaseException:
            self.store.close()
            raise
        self.batch_size = max(1, min(_BATCH_KEYS, _BATCH_BYTES // payload_bytes, self.staging.slots // _READ_AHEAD))

    @property
    def available(self) -> bool:
        return self.store.available

    def wait_available(self, timeout: float) -> None:
        self.store.wait_open(timeout)

    def batched_contains(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        return self.store.batch_exist(list(keys), timeout=self._seconds(timeout, self._timeouts.exist_ms))

    def batched_get(self, keys: Sequence[str], *, timeout: float | None = None) -> Generator[Fetched, None, None]:
        longest = self._timeouts.get_ms / 1000
        deadline = None if timeout is None else time.monotonic() + timeout
        ahead: deque[_Batch] = deque()
        started = 0
        try:
            while started < len(keys) or ahead:
                while started < len(keys) and len(ahead) < _READ_AHEAD:
                    seconds = longest if deadline is None else min(longest, max(0.0, deadline - time.monotonic()))
                    # only a reader that holds nothing waits for a slot: two readers can never wait for each other
                    slots = self._lease(min(self.batch_size, len(keys) - started), 0.0 if ahead else seconds)
                    if not slots:
                        break
                    batch = list(keys[started : started + len(slots)])
                    started += len(slots)
                    ahead.append(_Batch(batch, slots, self.store.start_get(batch, list(slots), timeout=seconds)))
                if not ahead:
                    reason = "no_staging" if self.store.available else Status.POOL_DOWN.value
                    for _ in keys[started:]:
                        yield _FetchedSlot(None, None, reason)
                    return
                batch_keys, slots, call = ahead[0]
                for key, result in zip(batch_keys, call.results(), strict=True):
                    yield self._checked(key, slots.popleft(), result)
                ahead.popleft()
        finally:
            for batch_left in ahead:
                for slot in batch_left.slots:
                    slot.release()

    def stage(self, *, timeout: float | None = None) -> Staged | None:
        slot = self.staging.lease(time.monotonic() + self._seconds(timeout, self._timeouts.put_ms))
        return None if slot is None else _StagedSlot(slot, self.payload_bytes)

    def batched_put(self, keys: Sequence[str], staged: Sequence[Staged], *, timeout: float | None = None) -> PutOutcome:
        slots = [item.slot for item in staged if isinstance(item, _StagedSlot)]
        if len(slots) != len(keys):
            raise ValueError("batched_put takes one piece of memory per key, as `stage` lent it")
        try:
            if not self.store.available:
                return _Refused([Status.POOL_DOWN] * len(keys))
            sizes = [seal(key, slot.view, self.payload_bytes) for key, slot in zip(keys, slots, strict=True)]
            seconds = self._seconds(timeout, self._timeouts.put_ms)
            return self.store.start_put(list(keys), slots, sizes, timeout=seconds)
        finally:
            # the call in flight holds references of its own
            for slot in slots:
                slot.release()

    def batched_remove(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        return self.store.remove(list(keys), timeout=self._seconds(timeout, self._timeouts.exist_ms))

    def annotate(self, key: str, value: bytes, *, timeout: float | None = None) -> Status:
        return self.store.put_small(key, value, timeout=self._seconds(timeout, self._timeouts.exist_ms))

    def close(self) -> None:
        self.store.close()
        self.staging.close()

    def _seconds(self, timeout: float | None, default_ms: int) -> float:
        return default_ms / 1000 if timeout is None else timeout

    def _lease(self, count: int, wait: float) -> deque[Slot]:
        """Up to `count` slots: the first within `wait` seconds, the others only if they are free."""
        slots: deque[Slot] = deque()
        first = self.staging.lease(time.monotonic() + wait)
        while first is not None and len(slots) < count:
            slots.append(first)
            first = self.staging.try_lease() if len(slots) < count else None
        return slots

    def _checked(self, key: str, slot: Slot, result: GetResult) -> Fetched:
        if result.status is Status.OK:
            damage = inspect(key, slot.view[: result.size], self.payload_bytes)
            if damage is None:
                return _FetchedSlot(slot, slot.view[: self.payload_bytes], "")
            reason = damage.value
        elif result.status is Status.INVALID:
            reason = "other_size"  # the object is larger than a chunk of this namespace: Mooncake refuses to read it
        else:
            reason = result.status.value
        slot.release()
        return _FetchedSlot(None, None, reason)
