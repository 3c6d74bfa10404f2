"""StorageBackend: where chunk objects live. Batch-first, zero-copy, and never an exception for the storage's troubles.

1. A payload is opaque bytes of one size per backend; the backend seals and checks it.
2. Writers fill memory that the backend lends (`stage`), so that nothing is copied on the way out.
3. Readers get views of memory that the backend owns, in the order of the keys, while later ones are still on their way;
   each view is theirs until `release()`.
4. An object that is damaged, late or gone reads as a miss with a reason.
5. A key names its contents: putting a key that is there already changes nothing and is OK.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

from transfer.errors import Status

if TYPE_CHECKING:
    from pd_cache.backends.slots import ObjectMemory


class Staged(Protocol):
    """Memory for one payload, lent by `stage`. Either given to `batched_put` or released."""

    @property
    def payload(self) -> memoryview:
        """The payload's bytes, writable."""

    def seal(self, key: str) -> int:
        """Seal the payload as whole and as `key`'s: any later change is damage. Returns the object's size in bytes."""

    def release(self) -> None:
        """Give the memory back unused."""


class Fetched(Protocol):
    """One key's outcome."""

    @property
    def payload(self) -> memoryview | None:
        """The checked payload, valid until `release()`; None if it is a miss."""

    @property
    def reason(self) -> str:
        """Why there is no payload: a `Status` or `Damage` value; empty if there is one."""

    def release(self) -> None:
        """Give the payload back: it is not needed any more. Idempotent."""


class PutOutcome(Protocol):
    """A write under way."""

    def results(self) -> list[Status]:
        """Returns one status for each key. Waits for the write, at most until its deadline."""


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
    """The memory that `stage` lends from and that payloads are read into."""
    batch_size: int
    """How many payloads are best handed over together."""
    settles_at_once: bool = False
    """Whether a write has ended when `batched_put` returns."""

    @property
    @abstractmethod
    def available(self) -> bool:
        """False while it is known to be unusable: calls then return at once."""

    @abstractmethod
    def wait_available(self, timeout: float) -> None:
        """Wait until it is open. Raises PoolUnavailableError after `timeout` seconds."""

    @abstractmethod
    def batched_contains(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        """Returns OK or MISSING for each key; another status if the backend cannot tell."""

    def batched_wants(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        """As `batched_contains`, for a caller that is about to put: MISSING if a put would be of use.

        The two differ if there are several tiers: a key may be in one of them, and still be missing in the tier that other nodes read.
        """
        return self.batched_contains(keys, timeout=timeout)

    @abstractmethod
    def batched_get(self, keys: Sequence[str], *, timeout: float | None = None) -> Generator[Fetched, None, None]:
        """Yields each key's outcome, in order. No key may occur twice. Closing the iterator early gives up the rest.

        The caller releases each outcome. `timeout` (s) bounds the whole call; without it each transfer has the configured
        one.
        """

    @abstractmethod
    def stage(self, *, timeout: float | None = None) -> Staged | None:
        """Returns memory for one payload; None if none came free in time."""

    def wait_room(self, timeout: float | None = None) -> bool:
        """Wait until a put would be accepted. For callers that hold no memory. Returns False after `timeout` seconds."""
        return True

    @abstractmethod
    def batched_put(self, keys: Sequence[str], staged: Sequence[Staged], *, timeout: float | None = None) -> PutOutcome:
        """Begin to write each payload under its key. The staged memory is the backend's from here on.

        Raises ValueError for memory that this backend's `stage` did not lend, and unless there is one piece for each key.
        """

    @abstractmethod
    def batched_remove(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        """Remove keys. Returns MISSING for a key that is not there, BUSY for one that a reader uses."""

    def pin(self, keys: Sequence[str]) -> Sequence[str]:
        """Keep keys from being evicted from local tiers; returns which of them are pinned now, each until one `unpin`.

        Other keys are kept in other ways, if at all: `batched_contains` renews the lease of the pool's objects.
        """
        return ()

    def unpin(self, keys: Sequence[str]) -> None:  # noqa: B027 - a backend that never pins has nothing to undo
        """Undo one `pin` of each key."""

    @abstractmethod
    def annotate(self, key: str, value: bytes, *, timeout: float | None = None) -> Status:
        """Leave a small object for people and tools, such as a namespace's manifest."""

    @abstractmethod
    def close(self) -> None:
        """Finish or abandon what is under way, by a deadline. Idempotent."""
