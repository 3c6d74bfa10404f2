"""BlockCache: a cache as a serving engine's worker uses it, in terms of chunk names and block ids."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pd_cache.reasons import Found, Loaded

if TYPE_CHECKING:
    import torch

    from pd_cache.chunks import ExtraKey, Tokens
    from pd_cache.metrics import CacheMetrics


class StoreOutcome(enum.IntEnum):
    """What a store achieved for a chunk."""

    NOT = 0
    """The chunk is not in the pool, or not known to be there."""
    BEFORE = 1
    """The chunk was there already."""
    NEW = 2
    """The chunk was missing, and is there after the put. Another node may have put it at the same time."""

    @staticmethod
    def together(parts: Iterable[StoreOutcome]) -> StoreOutcome:
        """Returns the outcome for a chunk of several parts: NEW if all parts are there and at least one is new."""
        known = list(parts)
        return StoreOutcome.NOT if StoreOutcome.NOT in known else max(known)


class Slots(NamedTuple):
    """Places of single tokens in a paged cache, for an engine that does not work in whole blocks."""

    mapping: torch.Tensor
    """int `[chunks * chunk_size]`: `block * block_size + offset` of each token."""


BlocksOrSlots = Sequence[int] | Slots
"""Where chunks lie in a paged cache: the blocks, in order, or the slots of the tokens."""


class BlockCache(Protocol):
    """A cache over one paged KV cache, in this process (`CacheEngine`) or in the host's cache server (`ServerCache`). Thread-safe.

    If the pool or the server cannot do something, the prefix ends there or the chunk stays unstored. This is counted, and never raised.
    The caller's mistakes raise ValueError before anything moves. No call touches a block after it has returned.
    """

    metrics: CacheMetrics

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""

    @property
    def block_size(self) -> int:
        """Tokens per block of the paged cache."""

    @property
    def epoch(self) -> str | None:
        """The label of the version of this engine's weights (`pd_cache.versions`); None while it is unknown. See `store`."""

    @property
    def available(self) -> bool:
        """False while the pool or the server is known to be unreachable: every call is then a miss, immediately."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Uses these KV tensors, one per layer, in layer order, for calls that name no others."""

    def name_chunks(
        self, tokens: Tokens | None, hashes: Sequence[bytes] | None = None, extra_keys: Iterable[ExtraKey] = ()
    ) -> list[bytes]:
        """Returns the names of a prompt's whole chunks. The prompt is given as token ids or as the engine's block hashes."""

    def lookup(
        self, names: Sequence[bytes], *, at_hand: int = 0, session: str = "", timeout: float | None = None
    ) -> int:
        """Returns how many chunks, from the first, the cache holds with every shard.

        The first `at_hand` chunks are not looked up and count as found. A cache server protects what it found from eviction for
        `session`, until the session retrieves it or ends. `timeout` is in seconds.
        """

    def survey(
        self, names: Sequence[bytes], *, at_hand: int = 0, session: str = "", timeout: float | None = None
    ) -> Found:
        """Does the same as `lookup`. Returns how long the prefix is, and why it is not longer."""

    def store(
        self,
        names: Sequence[bytes],
        blocks: BlocksOrSlots,
        *,
        kv_caches: Any = None,
        after: Any = None,
        epoch: str | None = None,
        timeout: float | None = None,
    ) -> list[StoreOutcome]:
        """Stores the chunks that lie in `blocks` of `kv_caches` (by default, of the registered tensors). Returns the outcome of each.

        `epoch` is the version of the weights with which the chunks were computed: the label that a lookup reported before that. By default
        it is this engine's. Nothing is stored if it is not the current one.

        `after` is a `mark`: the chunks are read once the work before it is done. If only the ends of prefixes need these layers
        (`LayerGroup.tail`), the first blocks may be -1: no load will want them, and zeros are stored. `timeout` is in seconds.
        """

    def retrieve(
        self,
        names: Sequence[bytes],
        blocks: BlocksOrSlots,
        *,
        kv_caches: Any = None,
        session: str = "",
        epoch: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """Loads chunks into `blocks`. Returns how many of them, from the first, are there now.

        The first blocks may be -1, and so may the last: they are skipped. Blocks of chunks that were not loaded may have been overwritten;
        all other blocks are untouched. `epoch` is the label that the lookup of these chunks reported: if it is not current any more when the load ends,
        nothing was loaded. By default it is this engine's. `timeout` is in seconds.
        """

    def restore(
        self,
        names: Sequence[bytes],
        blocks: BlocksOrSlots,
        *,
        kv_caches: Any = None,
        session: str = "",
        epoch: str | None = None,
        timeout: float | None = None,
    ) -> Loaded:
        """Does the same as `retrieve`. Returns how many chunks were loaded, from which tiers, and why not more."""

    def end(self, session: str) -> None:
        """Releases what a session protects. Does nothing if there is no such session."""

    def mark(self) -> Any:
        """Marks the work that the calling thread has given the device so far, so that a store can wait for it."""

    def close(self) -> None:
        """Releases the cache and the KV tensors. Idempotent."""
