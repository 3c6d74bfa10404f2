"""The memory that the tiers of a node share: equal slots, each with room for one object.

An object lies in one slot from the moment the engine gathers it until the last tier lets go of it. A put hands the same
slot to every tier, and each holds a reference for as long as it needs the bytes: a transfer while it runs, the local tier
until the entry is evicted. A read leaves the bytes in a slot, which the local tier keeps by taking one more reference.
So neither write-through nor promotion copies anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pd_cache.backends.objects import SELF_SIZED, TRAILER_BYTES, Damage, payload_size, seal
from pd_cache.checksum import checksum
from transfer.errors import Status
from transfer.staging import Quota, Slot, StagingPool

if TYPE_CHECKING:
    from pd_cache.backends.base import Staged, TierKind


def _nothing() -> None:
    return


class StagedObject:
    """One reference to a slot that is being filled or that holds a whole object. See `base.Staged`."""

    __slots__ = ("_slot", "memory", "payload", "sealed_for")

    def __init__(self, memory: ObjectMemory, slot: Slot, payload_bytes: int, sealed_for: str | None = None) -> None:
        """Takes over one reference of `slot`."""
        self.memory = memory
        self._slot: Slot | None = slot
        self.payload = slot.view[:payload_bytes]
        self.sealed_for = sealed_for
        """The key whose trailer lies behind the payload."""

    @property
    def object_bytes(self) -> int:
        """The size of the object: payload and trailer."""
        return len(self.payload) + TRAILER_BYTES

    def cut(self, payload_bytes: int) -> None:
        """Makes the payload as long as it should be, after an intact object was read into the slot."""
        self.payload = self.slot.view[: payload_size(self.slot.view, payload_bytes)]

    @property
    def slot(self) -> Slot:
        """The slot. Raises ValueError if this reference was released."""
        if self._slot is None:
            raise ValueError("expected memory that is still held, but it was already released")
        return self._slot

    def seal(self, key: str, payload_checksum: int | None = None) -> int:
        """Writes the trailer, unless it is already there. Returns the object's size in bytes."""
        if self.sealed_for != key:
            seal(key, self.slot.view, len(self.payload), payload_checksum)
            self.sealed_for = key
        return self.object_bytes

    def share(self) -> StagedObject:
        """Returns one more reference to the same bytes. They must not be written to any more."""
        slot = self.slot
        slot.retain()
        return StagedObject(self.memory, slot, len(self.payload), self.sealed_for)

    def release(self) -> None:
        """Lets go of this reference. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()


class FetchedObject:
    """One key's outcome; see `base.Fetched`. A hit holds one reference to the slot that its object lies in."""

    __slots__ = ("_expected", "_on_release", "_when_checked", "payload", "reason", "staged", "tier")

    def __init__(
        self,
        staged: StagedObject | None,
        reason: str = "",
        *,
        expected: int = 0,
        on_release: Callable[[], None] = _nothing,
    ) -> None:
        """Takes an object whose payload should have the checksum `expected`, or the `reason` why there is none.

        `on_release` runs once, for a hit only.
        """
        self.staged = staged
        self._expected = expected
        self._on_release = on_release
        self._when_checked: list[Callable[[FetchedObject], None]] = []
        self.payload: memoryview | None = None if staged is None else staged.payload
        self.reason = reason
        self.tier: TierKind = "pool"

    def when_checked(self, call: Callable[[FetchedObject], None]) -> None:
        """Has `call` run after the first check, which leaves its outcome in `reason`. For tiers; the last to ask is called first."""
        self._when_checked.append(call)

    def check(self, payload_checksum: int | None = None) -> str:
        if self.payload is None:
            if not self.reason:
                raise ValueError("expected a payload that is still held, but it was already released")
            return self.reason
        found = checksum(self.payload) if payload_checksum is None else payload_checksum
        if found != self._expected:
            self.reason = Damage.CORRUPT.value
        while self._when_checked:
            self._when_checked.pop()(self)
        return self.reason

    def share(self) -> StagedObject | None:
        """Returns one more reference to the object, for another tier to keep; None for a miss."""
        return None if self.staged is None else self.staged.share()

    def release(self) -> None:
        staged, self.staged, self.payload = self.staged, None, None
        self._when_checked.clear()
        if staged is not None:
            staged.release()
            self._on_release()


class ObjectMemory:
    """Slots of one `StagingPool`, each for an object with a payload of at most `payload_bytes`."""

    def __init__(self, pool: StagingPool, payload_bytes: int) -> None:
        """Raises ValueError if the pool's slots are too small."""
        self.payload_bytes = payload_bytes
        self.object_bytes = payload_bytes + TRAILER_BYTES
        if pool.slot_bytes < self.object_bytes:
            raise ValueError(f"slots of {pool.slot_bytes} bytes cannot hold an object of {self.object_bytes} bytes")
        self.pool = pool

    def stage(
        self, seconds: float, quota: Quota | None = None, *, payload_bytes: int | None = None
    ) -> StagedObject | None:
        """Returns memory for one payload, which counts in `quota`; None if none came free within `seconds`."""
        size = self.sized(payload_bytes)
        slot = self.pool.lease(time.monotonic() + seconds, quota)
        return None if slot is None else StagedObject(self, slot, size)

    def read_size(self, payload_bytes: int | None) -> int:
        """Does the same as `sized` for a reader, who may also give `SELF_SIZED`."""
        return SELF_SIZED if payload_bytes == SELF_SIZED else self.sized(payload_bytes)

    def sized(self, payload_bytes: int | None) -> int:
        """Returns the size of a payload, by default the largest. Raises ValueError for one that no slot holds."""
        size = self.payload_bytes if payload_bytes is None else payload_bytes
        if not 0 <= size <= self.payload_bytes:
            raise ValueError(f"payloads have at most {self.payload_bytes} bytes here, got {size}")
        return size

    @property
    def refusal(self) -> str:
        """The reason why `stage` lent nothing, as the reason of a miss."""
        return Status.CLOSED.value if self.pool.closed else "no_staging"

    def own(self, staged: Sequence[Staged], keys: Sequence[str]) -> list[StagedObject]:
        """Returns `staged`, checked. Raises ValueError unless `stage` lent each piece and there is one for each key."""
        own = [item for item in staged if isinstance(item, StagedObject) and item.memory.pool is self.pool]
        if len(own) != len(keys) or len(staged) != len(keys):
            raise ValueError(
                "batched_put expects one piece of memory for each key, lent by `stage` of the same backend"
            )
        return own

    def close(self) -> None:
        """Stops lending. Memory that is lent stays valid until it is released. Idempotent."""
        self.pool.close()


def slots_of(capacity: int, payload_bytes: int) -> int:
    """Returns how many objects fit into `capacity` bytes of memory."""
    return capacity // StagingPool.stride_of(payload_bytes + TRAILER_BYTES)
