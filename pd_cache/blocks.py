"""BlockCache: a cache as a serving engine's worker uses it, by the names of chunks and the ids of blocks."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from pd_cache.metrics import CacheMetrics
    from pd_cache.tokens import ExtraKey, Tokens


class StoreOutcome(enum.IntEnum):
    """What a store did for a chunk."""

    NOT = 0
    """The chunk is not in the pool, or not known to be."""
    BEFORE = 1
    """The chunk was there already."""
    NEW = 2
    """The chunk was missing, and is there after the put. Another node may have put it at the same time: Mooncake's puts of a key that is
    there succeed, and a host client cannot tell the two apart."""

    @staticmethod
    def together(parts: Iterable[StoreOutcome]) -> StoreOutcome:
        """Returns the outcome for a chunk of several parts: new if a part is new and all are there."""
        known = list(parts)
        return StoreOutcome.NOT if StoreOutcome.NOT in known else max(known)


class Slots(NamedTuple):
    """Places of tokens in a paged cache, one by one, for an engine that does not think in whole blocks."""

    mapping: torch.Tensor
    """int `[chunks * chunk_size]`: `block * block_size + offset` of each token."""


Places = Sequence[int] | Slots
"""Where chunks lie in a paged cache: their blocks, in order, or the slots of their tokens."""


class BlockCache(Protocol):
    """A cache over one paged KV cache, in this process (`CacheEngine`) or in the host's cache server (`ServerCache`). Thread-safe.

    What the pool or the server cannot do ends the prefix or leaves a chunk unstored. It is counted, and never raised. The
    caller's mistakes raise ValueError before anything moves. No call touches a block after it has returned.
    """

    metrics: CacheMetrics

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""

    @property
    def block_size(self) -> int:
        """Tokens per block of the paged cache."""

    @property
    def available(self) -> bool:
        """False while the pool or the server is known to be away: every call is then a miss, at once."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Uses these KV tensors, one per layer, in layer order, where a call names no others."""

    def name_chunks(
        self, tokens: Tokens | None, hashes: Sequence[bytes] | None = None, extra_keys: Iterable[ExtraKey] = ()
    ) -> list[bytes]:
        """Returns the names of a prompt's whole chunks, given as token ids or as the engine's block hashes."""

    def lookup(
        self, names: Sequence[bytes], *, at_hand: int = 0, session: str = "", timeout: float | None = None
    ) -> int:
        """Returns how many chunks, from the first, the cache holds with every shard.

        The first `at_hand` chunks are not asked for and count as found. Where the cache is a server, it keeps what it found from
        eviction for `session`, until that retrieves it or ends. `timeout` is in seconds.
        """

    def store(
        self,
        names: Sequence[bytes],
        blocks: Places,
        *,
        kv_caches: Any = None,
        after: Any = None,
        timeout: float | None = None,
    ) -> list[StoreOutcome]:
        """Stores chunks that lie in `blocks` of `kv_caches`, or of the registered tensors; returns what became of each.

        `after` is a `mark` after which they are computed.
        """

    def retrieve(
        self,
        names: Sequence[bytes],
        blocks: Places,
        *,
        kv_caches: Any = None,
        session: str = "",
        timeout: float | None = None,
    ) -> int:
        """Loads chunks into `blocks`; returns how many of them, from the first, lie there now.

        The first blocks may be -1: they are left out. Blocks of chunks that were not loaded may have been overwritten; all other
        blocks are untouched.
        """

    def end(self, session: str) -> None:
        """Lets go of what a session keeps. Nothing happens if there is none."""

    def mark(self) -> Any:
        """Marks the work that the calling thread has given the device so far, for a store to come after."""

    def close(self) -> None:
        """Lets go of the cache and of the KV tensors. Idempotent."""
