"""StorageBackend: where chunk objects live. Batch-first, zero-copy, and never an exception for the storage's troubles.

1. A payload is opaque bytes of one size per backend; sealing and checking it is the backend's work.
2. Writers fill memory that the backend lends (`stage`), so that nothing is copied on the way out.
3. Readers get views of memory that the backend owns, in the order of the keys, while later ones are still on their way;
   each view is theirs until `release()`.
4. What is damaged, late or gone reads as a miss with a reason.
5. A key names its contents: putting a key that is there already changes nothing and is OK.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

from transfer.errors import Status

if TYPE_CHECKING:
    from pd_cache.backends.memory import ObjectMemory


class Staged(Protocol):
    """Memory for one payload, lent by `stage`. Either given to `batched_put` or released."""

    @property
    def payload(self) -> memoryview:
        """The payload's bytes, writable."""

    def seal(self, key: str) -> int:
        """Note that the payload is whole, and `key`'s; what is changed afterwards is damage. The object's size in bytes."""

    def release(self) -> None:
        """Give the memory back unused."""


class Fetched(Protocol):
    """One key's outcome."""

    @property
    def payload(self) -> memoryview | None:
        """The checked payload, valid until `release()`; None for a miss."""

    @property
    def reason(self) -> str:
        """Why there is no payload: a `Status` or `Damage` value; empty if there is one."""

    def release(self) -> None:
        """The payload is not needed any more. Idempotent."""


class PutOutcome(Protocol):
    """A write under way."""

    def results(self) -> list[Status]:
        """One status a key; waits for the write, at most until its deadline."""


class Settled:
    """A write whose outcome is known."""

    def __init__(self, statuses: list[Status]) -> None:
        self._statuses = statuses

    def results(self) -> list[Status]:
        return self._statuses


class StorageBackend(ABC):
    """A place for chunk objects. Thread-safe."""

    payload_bytes: int
    """Bytes of every payload."""
    memory: ObjectMemory
    """What `stage` lends from, and what payloads are read into."""
    batch_size: int
    """Payloads that are best handed over together."""
    settles_at_once: bool = False
    """Whether a write has ended when `batched_put` returns."""

    @property
    @abstractmethod
    def available(self) -> bool:
        """False while it is known to be of no use: calls then answer at once."""

    @abstractmethod
    def wait_available(self, timeout: float) -> None:
        """Wait until it was opened; PoolUnavailableError after `timeout` seconds."""

    @abstractmethod
    def batched_contains(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        """OK or MISSING for each key; another status where the backend cannot tell."""

    def batched_wants(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        """As `batched_contains`, for whoever is about to put: MISSING where that would be of use.

        They differ where there are several tiers: a key may be found in one, and still be missing where others look.
        """
        return self.batched_contains(keys, timeout=timeout)

    @abstractmethod
    def batched_get(self, keys: Sequence[str], *, timeout: float | None = None) -> Generator[Fetched, None, None]:
        """Each key's outcome, in order; no key may stand twice. Closing the iterator early gives up what was not yielded.

        The caller releases what was yielded. `timeout` (s) bounds the whole; without it each transfer has the configured
        one.
        """

    @abstractmethod
    def stage(self, *, timeout: float | None = None) -> Staged | None:
        """Memory for one payload; None if none came free in time."""

    def wait_room(self, timeout: float | None = None) -> bool:
        """Wait until a put would be taken, for callers that hold no memory. False if that took longer than `timeout`."""
        return True

    @abstractmethod
    def batched_put(self, keys: Sequence[str], staged: Sequence[Staged], *, timeout: float | None = None) -> PutOutcome:
        """Begin to write each payload under its key. The staged memory is the backend's from here on.

        ValueError for memory that this backend's `stage` did not lend, or not one piece a key.
        """

    @abstractmethod
    def batched_remove(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        """Remove keys; MISSING for one that is not there, BUSY for one that a reader holds."""

    def pin(self, keys: Sequence[str]) -> Sequence[str]:
        """Keep keys from being evicted from local tiers; which of them are pinned now, each for one `unpin`.

        The others are held otherwise, if at all: the pool's objects by `batched_contains`, which renews their lease.
        """
        return ()

    def unpin(self, keys: Sequence[str]) -> None:  # noqa: B027 - a backend that pins nothing has nothing to undo
        """Undo one `pin` of each key."""

    @abstractmethod
    def annotate(self, key: str, value: bytes, *, timeout: float | None = None) -> Status:
        """Leave a small object for people and tools, such as a namespace's manifest."""

    @abstractmethod
    def close(self) -> None:
        """Finish or abandon what is under way, by a deadline. Idempotent."""
