"""MooncakeBackend: the shared pool. Objects move between staging memory and the network without another copy.

Reads run ahead: while the caller scatters a batch of chunks, the next batches are in flight, as far as
staging memory allows. The transfers themselves are `start_get` and `start_put` of `transfer/store.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

from pd_cache.chunks import Keys
from pd_cache.config import NodeSettings
from pd_cache.layout import checksum
from pd_cache.metrics import CacheMetrics, TierMetrics
from pd_cache.tiers.base import PutOutcome, StorageBackend
from pd_cache.tiers.memory import (
    BATCH_BYTES,
    Damage,
    Fetched,
    ObjectMemory,
    Staged,
    inspect,
    payload_size,
    slots_of,
)
from transfer.deadlines import End, end_or, sooner
from transfer.errors import Status
from transfer.staging import Quota, Slot
from transfer.store import GetResult, MooncakeStore, Pending

_BATCH_KEYS = 256
_READ_AHEAD = 4
"""The most batches of a reader that are in flight or being scattered."""
_SHARE, _READS, _PUTS = 8, 5, 4
"""Reads may hold 5/8 of the slots while they wait for a peer, puts 4/8. The batches of all threads together
take 1/8. `transfer/staging.py` has the arithmetic. The second read of a damaged object uses a slot that no
longer counts."""

_DAMAGED = frozenset({*(damage.value for damage in Damage), "other_size", Status.CHECKSUM.value})
"""Reasons to remove an object. `checksum` is Mooncake's own, for an object that another client wrote."""


class _Batch(NamedTuple):
    """Keys that are read together, and the slots of those that are not yielded yet."""

    keys: list[str]
    slots: deque[Slot]
    call: Pending
    end: float
    """The deadline for all work on the batch's keys, by `time.monotonic()`."""


class MooncakeBackend(StorageBackend):
    """Chunk objects in the pool of a Mooncake master, through a store client and a staging pool."""

    def __init__(
        self,
        settings: NodeSettings,
        memory: ObjectMemory,
        *,
        batch_bytes: int | None = None,
        metrics: TierMetrics | None = None,
    ) -> None:
        """Takes over `memory`, and begins to open the store. Does not wait for the pool. A batch has about
        `batch_bytes`, by default 64 MiB."""
        transfer = settings.transfer
        self.memory, self.staging = memory, memory.pool
        self.payload_bytes = payload_bytes = memory.payload_bytes
        self._timeouts = transfer.timeouts
        self._metrics = metrics or CacheMetrics().tier("mooncake")
        self._closed = False
        self.store = MooncakeStore(
            transfer,
            master=settings.master,
            host=settings.host,
            segment_size=settings.segment_size,
            placement=settings.cache.pool,
        )
        try:
            self.store.attach(self.staging)
        except BaseException:
            self.store.close()
            raise
        # the quota leaves out the slots in which a local tier keeps objects
        slots = slots_of(transfer.staging_size, payload_bytes)
        self._reads = Quota(min(slots - 1, -(-_READS * slots // _SHARE)), headroom=slots // _SHARE)
        self._puts = Quota(_PUTS * slots // _SHARE, headroom=slots // _SHARE)
        per_call = min(_BATCH_KEYS, (batch_bytes or BATCH_BYTES) // max(1, payload_bytes))
        self.batch_size = max(1, min(per_call, slots // (_SHARE * transfer.threads)))

    @property
    def available(self) -> bool:
        return self.store.available

    def wait_available(self, timeout: float) -> None:
        self.store.wait_open(timeout)

    def batched_contains(self, keys: Keys, end: End = None) -> list[Status]:
        return self.store.batched_contains(keys, end)

    def batched_fetch(
        self, keys: Keys, *, payload_bytes: int | None = None, end: End = None
    ) -> Generator[list[Fetched], None, None]:
        size = self.memory.read_size(payload_bytes)
        batches: deque[_Batch] = deque()
        started = 0
        try:
            while started < len(keys) or batches:
                while started < len(keys) and len(batches) < _READ_AHEAD:
                    # only a reader that holds no slot waits for one, so two readers never wait for each other
                    waits = not batches and self.store.available
                    batch = self._begin_get(keys[started : started + self.batch_size], end, waits=waits)
                    if batch is None:
                        break
                    batches.append(batch)
                    started += len(batch.keys)
                if not batches:
                    down = not self._closed and not self.store.available
                    reason = Status.POOL_DOWN.value if down else self.memory.refusal
                    yield [Fetched(None, reason) for _ in keys[started:]]
                    return
                batch_keys, slots, call, until = batches[0]
                together: list[Fetched] = []
                try:
                    for key, result in zip(batch_keys, call.results(), strict=True):
                        found = self._object(key, slots[0], result, size)
                        if found in _DAMAGED:
                            if together:  # a reader holds no outcomes while it reads the object again
                                ready, together = together, []
                                yield ready
                            found = self._look_again(key, slots[0], str(found), size, until)
                        together.append(self._fetched(key, slots.popleft(), found, size, until))
                except BaseException:
                    for fetched in together:
                        fetched.release()
                    raise
                batches.popleft()
                yield together
        finally:
            for batch_left in batches:
                batch_left.call.abandon()
                for slot in batch_left.slots:
                    slot.release()

    def stage(self, *, payload_bytes: int | None = None, end: End = None) -> Staged | None:
        return self.memory.stage(end_or(end, self._timeouts.put_ms), self._puts, payload_bytes=payload_bytes)

    def batched_put(self, keys: Keys, staged: Sequence[Staged], end: End = None) -> PutOutcome:
        items = self.memory.own(staged, keys)
        try:
            sizes = [item.seal(key) for key, item in zip(keys, items, strict=True)]
            return self.store.start_put(keys, [item.slot for item in items], sizes, end)
        finally:
            # the call in flight holds its own references
            for item in items:
                item.release()

    def batched_remove(self, keys: Keys, end: End = None, *, force: bool = False) -> list[Status]:
        if self._closed:
            return [Status.CLOSED] * len(keys)
        return self.store.remove(keys, end, force=force)

    def annotate(self, key: str, value: bytes, end: End = None) -> Status:
        if self._closed:
            return Status.CLOSED
        return self.store.put_small(key, value, end)

    def close(self) -> None:
        self._closed = True
        self.store.close()
        self.staging.close()

    def _begin_get(self, keys: Keys, end: End, *, waits: bool) -> _Batch | None:
        """Begins to read the first of these keys, as many as there are free slots. If it `waits`, it waits
        for the first slot. Returns None if it gets no slot."""
        until = sooner(end, self._timeouts.get_ms)  # for the memory and the transfer together
        slots: deque[Slot] = deque()
        slot = self.staging.lease(until if waits else 0.0, self._reads)
        while slot is not None:
            slots.append(slot)
            slot = self.staging.lease(0.0, self._reads) if len(slots) < len(keys) else None
        if not slots:
            return None
        batch = list(keys[: len(slots)])
        return _Batch(batch, slots, self.store.start_get(batch, slots, until), until)

    def _fetched(self, key: str, slot: Slot, found: str | int, size: int, end: float) -> Fetched:
        """Returns a key's outcome. `found` is the result of `_object`. Takes over the slot."""
        if isinstance(found, str):
            slot.release()
            return Fetched(None, found)
        slot.settle()  # the peer has delivered, so the slot leaves the quota
        staged = Staged(self.memory, slot, payload_size(slot.view, size), key)
        return Fetched(staged, expected=found, source=(key, slot, size, end))

    def _forget(self, damaged: Fetched) -> None:
        key, slot, size, end = damaged.source
        self._look_again(key, slot, damaged.reason, size, end)

    def _object(self, key: str, slot: Slot, result: GetResult, size: int) -> str | int:
        """Returns the reason why a slot does not hold an object of `key` after a read, or the checksum that
        its payload must have."""
        if result.status is Status.OK:
            found = inspect(key, slot.view[: result.size], size)
            return found.value if isinstance(found, Damage) else found
        # Mooncake refuses to read an object larger than the slot; a chunk of this namespace would fit
        return "other_size" if result.status is Status.INVALID else result.status.value

    def _look_again(self, key: str, slot: Slot, reason: str, size: int, end: float) -> str | int:
        """Reads a damaged object again, and removes it if it is still damaged in the same way, so that its
        next writer replaces it.

        Returns what `_object` returns, or the first `reason` if the object still cannot be used.

        The second read is needed because another reader may have found the damage first, and a writer may
        have replaced the object. Mooncake has no conditional removal, so a replacement that comes after the
        second read is removed, too. That costs a miss.
        """
        result = self.store.start_get([key], [slot], end).results()[0]
        found = self._object(key, slot, result, size)
        if isinstance(found, int) and checksum(slot.view[: payload_size(slot.view, size)]) != found:
            found = Damage.CORRUPT.value
        # Mooncake's code for a wrong size has other causes, too, so the second read may find another damage
        if found == reason or (reason == "other_size" and found in _DAMAGED):
            # by force: lookups of its prompt renew its lease, which would keep the damaged object
            until = sooner(end, self._timeouts.exist_ms)
            if self.store.remove([key], until, force=True) == [Status.OK]:
                self._metrics.healed()
        return reason if isinstance(found, str) else found
