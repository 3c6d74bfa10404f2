"""StorageBackend: storage for chunk objects. Batch-first and zero-copy. Trouble of the storage is a status,
never an exception.

1. A payload is opaque bytes. It has one of a few sizes, which the caller knows; `payload_bytes` is the
   largest. Its checksum is end to end: the writer computes it from the bytes that it copied, and the reader
   from the bytes that it has used.
2. Writers fill memory that the backend lends (`stage`), so that nothing is copied on the way out.
3. Readers get views of memory that the backend owns, in the order of the keys, while later payloads are still
   on their way. A view is valid until `release()`.
4. An object that is damaged, late or gone reads as a miss with a reason.
5. A key names its contents: a put of a key that is already there changes nothing and returns OK.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol

from pd_cache.chunks import Keys
from pd_cache.layout import checksum
from pd_cache.reasons import TierChunks
from pd_cache.tiers.memory import Damage, Fetched, ObjectMemory, Staged, TierKind
from transfer.deadlines import End
from transfer.errors import Status


class PutOutcome(Protocol):
    """A write under way."""

    def results(self) -> list[Status]:
        """Waits for the write, at most until its deadline. Returns one status for each key."""


class Settled(NamedTuple):
    """A write whose outcome is known."""

    statuses: list[Status]

    def results(self) -> list[Status]:
        return self.statuses


class StorageBackend(ABC):
    """Stores chunk objects. Thread-safe."""

    payload_bytes: int
    """The size of the largest payload in bytes. Calls that name no size mean this one."""
    memory: ObjectMemory
    """The memory that `stage` lends, and into which payloads are read."""
    batch_size: int
    """The best number of payloads for a call."""
    kind: TierKind = "pool"
    """Where the tier keeps objects. A tier in memory has written them when `batched_put` returns."""
    near: Callable[[Keys], TierChunks] | None = None
    """Returns how many of these keys are in tiers of this host. Does not ask the pool, whose number is 0.
    None if there is no such tier."""

    @property
    @abstractmethod
    def available(self) -> bool:
        """False while the backend is known to be unusable: calls then return at once."""

    @abstractmethod
    def wait_available(self, timeout: float) -> None:
        """Waits until the backend is open. Raises PoolUnavailableError after `timeout` seconds."""

    @abstractmethod
    def batched_contains(self, keys: Keys, end: End = None) -> list[Status]:
        """Returns OK or MISSING for each key, or another status if the backend cannot find out."""

    def batched_wants(self, keys: Keys, end: End = None) -> list[Status]:
        """As `batched_contains`, for a caller that is about to put. MISSING means that a put would be useful.

        The two differ if there are several tiers: a key may be in one tier, and missing in the tier that
        other nodes read.
        """
        return self.batched_contains(keys, end)

    @abstractmethod
    def batched_fetch(
        self, keys: Keys, *, payload_bytes: int | None = None, end: End = None
    ) -> Generator[list[Fetched], None, None]:
        """Yields each key's outcome, in order. A list has the outcomes that are ready at the same time. No
        key may occur twice. Closing the iterator early gives up the rest.

        All payloads have `payload_bytes`; an object of another size is damaged. With `memory.SELF_SIZED`,
        each payload begins with its own size.

        The caller must release each outcome of a list before it asks for the next list: a reader that waits
        for memory holds none, so no two readers wait for each other. The whole call ends by `end`; without
        it, the configured time-out bounds each transfer.
        """

    def batched_get(
        self, keys: Keys, *, payload_bytes: int | None = None, end: End = None
    ) -> Generator[Fetched, None, None]:
        """Yields the outcomes of `batched_fetch` one at a time. The caller must release each."""
        with contextlib.closing(self.batched_fetch(keys, payload_bytes=payload_bytes, end=end)) as fetches:
            for together in fetches:
                left = iter(together)
                try:
                    yield from left
                finally:
                    for fetched in left:
                        fetched.release()

    def check(self, fetched: Fetched, payload_checksum: int | None = None) -> str:
        """Returns why the object cannot be used: it is missing, or its payload has another checksum than when
        it was put. Returns an empty text if it can be used.

        Compute `payload_checksum` after the payload was used, from the bytes that were used. Then later
        changes of the memory do not matter, and earlier changes are detected. By default, the checksum of the
        present payload is computed here. A tier forgets an object that is damaged, so that it can be read
        from another tier, or stored again. Raises ValueError after `Fetched.release`.
        """
        if fetched.payload is None:
            if not fetched.reason:
                raise ValueError("expected a payload that is still held, but it was already released")
            return fetched.reason
        found = checksum(fetched.payload) if payload_checksum is None else payload_checksum
        if found != fetched.expected and not fetched.reason:
            fetched.reason = Damage.CORRUPT.value
            self._forget(fetched)
        return fetched.reason

    def _forget(self, damaged: Fetched) -> None:  # noqa: B027 - several tiers have each forget its own
        """Forgets a damaged object of this tier."""

    @abstractmethod
    def stage(self, *, payload_bytes: int | None = None, end: End = None) -> Staged | None:
        """Returns memory for a payload of this size, or None if none became free in time. Does not wait if
        `end` is 0."""

    def wait_room(self, end: End = None) -> bool:
        """Waits until a put would be accepted. Returns False if that is not the case by `end`. The caller
        must hold no staged memory."""
        return True

    @abstractmethod
    def batched_put(self, keys: Keys, staged: Sequence[Staged], end: End = None) -> PutOutcome:
        """Begins to write each payload under its key. Takes over the staged memory.

        Raises ValueError if this backend's `stage` did not lend the memory, or if there are not as many
        pieces as keys.
        """

    @abstractmethod
    def batched_remove(self, keys: Keys, end: End = None, *, force: bool = False) -> list[Status]:
        """Removes keys. The status is MISSING for a key that is not there, and BUSY for a key that is being
        read.

        A lookup in the pool counts as a read until its lease ends. With `force`, leases are ignored; a read
        under way may then find damage.
        """

    def pin(self, keys: Keys) -> Keys:
        """Protects keys from eviction from local tiers until `unpin`. Returns the keys that are pinned now.

        Does not protect the pool's objects; `batched_contains` does, because it renews their lease.
        """
        return ()

    def unpin(self, keys: Keys) -> None:  # noqa: B027 - a backend that never pins has nothing to undo
        """Undoes one `pin` of each key."""

    @abstractmethod
    def annotate(self, key: str, value: bytes, end: End = None) -> Status:
        """Stores a small object for people and tools, such as a namespace's manifest."""

    @abstractmethod
    def close(self) -> None:
        """Finishes what is under way, or abandons it at a deadline. Idempotent."""
