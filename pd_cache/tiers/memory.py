"""The memory that the tiers of a node share, and the objects in it.

The memory is equal slots, each with room for one object. An object lies in the same slot from the moment when
the engine gathers it until the last tier releases it. A put hands the slot to every tier. Each tier holds a
reference for as long as it needs the bytes: the pool until its transfer has ended, the local tier until it
evicts the entry. A read leaves the bytes in a slot, and the local tier keeps them with another reference. So
neither write-through nor promotion copies anything.

An object is its payload, then a 32-byte trailer:

    offset  size
    0       4     magic "PDC1"
    4       2     format version (1)
    6       2     zero
    8       8     payload length
    16      8     XXH3-64 of the payload, see `pd_cache.layout.Digest`
    24      8     XXH3-64 of the key, so that an object under a wrong key is recognised

All fields are little-endian. An object with any wrong field is never used. A payload whose reader does not
know its size begins with that size, as 8 bytes (`SELF_SIZED`).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pd_cache.chunks import Keys
from pd_cache.layout import checksum
from transfer.errors import Status
from transfer.staging import Quota, Slot, StagingPool

TierKind = Literal["memory", "disk", "pool"]

_TRAILER = struct.Struct("<4sHHQQQ")
_MAGIC = b"PDC1"
VERSION = 1
TRAILER_BYTES = _TRAILER.size
_SIZE = struct.Struct("<Q")
BATCH_BYTES = 64 << 20
"""The most bytes of payloads that a tier moves together. They are enough for full speed, and take well under
a second. A lease of the pool must last for three such transfers."""
SELF_SIZED = -1
"""Stands for the size of a payload whose first 8 bytes hold its size."""


class Damage(enum.Enum):
    """The reason why the bytes under a key are not its chunk."""

    TRUNCATED = "truncated"
    FOREIGN = "foreign"
    VERSION = "other_version"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    """The disk could not read the object: a bad block, or something other than a file is in its place."""


def seal(key: str, buffer: memoryview, payload_bytes: int, payload_checksum: int | None = None) -> int:
    """Writes the trailer behind the payload in `buffer`. Returns the object's size in bytes.

    `payload_checksum`: the checksum of the bytes that the payload should have; by default, of the bytes in
    `buffer`.
    """
    trailer = _TRAILER.pack(
        _MAGIC,
        VERSION,
        0,
        payload_bytes,
        checksum(buffer[:payload_bytes]) if payload_checksum is None else payload_checksum,
        checksum(key.encode()),
    )
    size = payload_bytes + TRAILER_BYTES
    buffer[payload_bytes:size] = trailer
    return size


def payload_size(data: memoryview, payload_bytes: int) -> int:
    """Returns `payload_bytes`; for `SELF_SIZED`, the size in the object's first bytes; -1 if impossible."""
    if payload_bytes != SELF_SIZED:
        return payload_bytes
    if len(data) < _SIZE.size:
        return -1
    (size,) = _SIZE.unpack(data[: _SIZE.size])
    return int(size) if _SIZE.size <= size <= len(data) - TRAILER_BYTES else -1


def inspect(key: str, data: memoryview, payload_bytes: int) -> Damage | int:
    """Returns what is wrong with the object of `key` in `data`, or the checksum that its payload must have.

    Looks only at the trailer. `payload_bytes` is the expected size of the payload. With `SELF_SIZED`, more
    bytes may follow the object.
    """
    if payload_bytes == SELF_SIZED:
        payload_bytes = payload_size(data, payload_bytes)
        data = data[: payload_bytes + TRAILER_BYTES]
    if payload_bytes < 0 or len(data) != payload_bytes + TRAILER_BYTES:
        return Damage.TRUNCATED
    magic, version, zero, length, payload_checksum, key_hash = _TRAILER.unpack(data[payload_bytes:])
    if magic != _MAGIC:
        return Damage.FOREIGN
    if version != VERSION or zero:
        return Damage.VERSION
    if length != payload_bytes:
        return Damage.TRUNCATED
    if key_hash != checksum(key.encode()):
        return Damage.FOREIGN
    return int(payload_checksum)


# --- slots --------------------------------------------------------------------------------------------------


class Staged:
    """Memory for a payload, lent by `StorageBackend.stage`: a reference to a slot that is being filled or
    that holds a whole object.

    The caller fills `payload`, then passes the object to `batched_put` or releases it.
    """

    __slots__ = ("_slot", "memory", "payload", "sealed_for")

    def __init__(
        self, memory: ObjectMemory, slot: Slot, payload_bytes: int, sealed_for: str | None = None
    ) -> None:
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
        """Cuts the payload to its length after an intact object was read into the slot."""
        self.payload = self.slot.view[: payload_size(self.slot.view, payload_bytes)]

    @property
    def slot(self) -> Slot:
        """The slot. Raises ValueError if this reference was released."""
        if self._slot is None:
            raise ValueError("expected memory that is still held, but it was already released")
        return self._slot

    def seal(self, key: str, payload_checksum: int | None = None) -> int:
        """Marks the payload as complete and as `key`'s. A payload that changes from then on is damaged.

        `payload_checksum` is the checksum of the bytes from which the payload was copied; by default, that
        of the payload itself. Returns the object's size in bytes.
        """
        if self.sealed_for != key:
            seal(key, self.slot.view, len(self.payload), payload_checksum)
            self.sealed_for = key
        return self.object_bytes

    def share(self) -> Staged:
        """Returns another reference to the same bytes, which must not be written to any more."""
        slot = self.slot
        slot.retain()
        return Staged(self.memory, slot, len(self.payload), self.sealed_for)

    def release(self) -> None:
        """Gives this reference back. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()


class Fetched:
    """A key's outcome. A hit holds a reference to the slot of its object.

    `payload` is valid until `release()`, and None for a miss. It may be damaged: see `StorageBackend.check`.
    `reason` says why it is a miss: a `Status` or `Damage` value; empty for a hit. `tier` is the kind of tier
    that the object was read from.
    """

    __slots__ = ("_on_release", "expected", "level", "payload", "reason", "source", "staged", "tier")

    def __init__(
        self,
        staged: Staged | None,
        reason: str = "",
        *,
        expected: int = 0,
        source: Any = None,
        tier: TierKind = "pool",
        on_release: Callable[[], None] | None = None,
    ) -> None:
        """Takes an object whose payload should have the checksum `expected`, or the `reason` why there is no
        object. `source` is the tier's own handle, by which it can remove a damaged object. `on_release` runs
        once, for a hit only."""
        self.staged = staged
        self._on_release = on_release
        self.expected = expected
        self.source = source
        self.payload: memoryview | None = None if staged is None else staged.payload
        self.reason = reason
        self.tier: TierKind = tier
        self.level: tuple[int, str] | None = None
        """Until the object is checked: the number of the tier that it came from, and its key. None with a
        single tier."""

    def share(self) -> Staged | None:
        """Returns another reference to the object, for another tier to keep; None for a miss."""
        return None if self.staged is None else self.staged.share()

    def release(self) -> None:
        """Gives the payload's memory back. Idempotent."""
        staged, self.staged, self.payload = self.staged, None, None
        if staged is not None:
            staged.release()
            if self._on_release is not None:
                self._on_release()


class ObjectMemory:
    """Slots of one `StagingPool`, each for an object with a payload of at most `payload_bytes`."""

    def __init__(self, pool: StagingPool, payload_bytes: int) -> None:
        """Raises ValueError if the pool's slots are too small."""
        self.payload_bytes = payload_bytes
        self.object_bytes = payload_bytes + TRAILER_BYTES
        if pool.slot_bytes < self.object_bytes:
            raise ValueError(
                f"slots of {pool.slot_bytes} bytes cannot hold an object of {self.object_bytes} bytes"
            )
        self.pool = pool
        self.batch_size = max(1, min(pool.slots // 4, BATCH_BYTES // max(1, payload_bytes)))
        """How many payloads a tier of this host takes together."""

    def stage(
        self, end: float, quota: Quota | None = None, *, payload_bytes: int | None = None
    ) -> Staged | None:
        """Returns memory for one payload, which counts in `quota`; None if no slot became free by `end`."""
        size = self.sized(payload_bytes)
        slot = self.pool.lease(end, quota)
        return None if slot is None else Staged(self, slot, size)

    def read_size(self, payload_bytes: int | None) -> int:
        """Returns the same as `sized`, for a reader, which may also give `SELF_SIZED`."""
        return SELF_SIZED if payload_bytes == SELF_SIZED else self.sized(payload_bytes)

    def sized(self, payload_bytes: int | None) -> int:
        """Returns the size of a payload, by default the largest. Raises ValueError for a size that no slot
        holds."""
        size = self.payload_bytes if payload_bytes is None else payload_bytes
        if not 0 <= size <= self.payload_bytes:
            raise ValueError(f"payloads have at most {self.payload_bytes} bytes here, got {size}")
        return size

    @property
    def refusal(self) -> str:
        """Why `stage` lent nothing, as the reason of a miss."""
        return Status.CLOSED.value if self.pool.closed else "no_staging"

    def own(self, staged: Sequence[Staged], keys: Keys) -> list[Staged]:
        """Returns `staged`. Raises ValueError unless `stage` lent each piece and there are as many pieces as
        keys."""
        own = [item for item in staged if item.memory.pool is self.pool]
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
