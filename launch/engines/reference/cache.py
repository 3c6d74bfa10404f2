"""What the engine needs of a cache, and the two things it does with one: load a prompt's prefix, store its chunks.

Both run on worker threads and never raise: a cache that fails in any way is a prefix that was not found.
"""

from __future__ import annotations

import array
import enum
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from pd_cache.tokens import ExtraKey

_logger = logging.getLogger(__name__)

_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.020
_LOG_EVERY_S = 10.0


class KVCache(Protocol):
    """The part of `pd_cache.engine.CacheEngine` that this engine uses; see there."""

    @property
    def available(self) -> bool: ...

    @property
    def chunk_size(self) -> int: ...

    def lookup(self, tokens: array.array[int], *, extra_keys: tuple[ExtraKey, ...] = ()) -> int: ...

    def retrieve(
        self,
        tokens: array.array[int],
        mask: torch.Tensor | None = None,
        *,
        kv_caches: dict[str, torch.Tensor],
        slot_mapping: torch.Tensor,
        extra_keys: tuple[ExtraKey, ...] = (),
    ) -> torch.Tensor: ...

    def store(
        self,
        tokens: array.array[int],
        mask: torch.Tensor | None = None,
        *,
        kv_caches: dict[str, torch.Tensor],
        slot_mapping: torch.Tensor,
        extra_keys: tuple[ExtraKey, ...] = (),
    ) -> int: ...


class LoadOutcome(enum.Enum):
    """How a load ended, for the metrics."""

    HIT = "hit"
    NOTHING = "nothing"
    """Nothing was loaded: it is not there, or the pool did not answer. The cache's own counters tell which."""
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    CANCELLED = "cancelled"


class LoadResult(NamedTuple):
    outcome: LoadOutcome
    tokens: int
    """Length of the prompt's prefix whose KV lies in the pages now: whole chunks."""


class Prefix(NamedTuple):
    """The whole chunks of a prompt, and where they lie or shall lie in the pages."""

    tokens: array.array[int]
    slots: torch.Tensor
    """int64, one slot a token."""
    extra_keys: tuple[ExtraKey, ...]


class PrefixCache:
    """A `KVCache` bound to one engine's pages."""

    def __init__(self, cache: KVCache, kv_caches: dict[str, torch.Tensor]) -> None:
        self.chunk_size = int(cache.chunk_size)
        if self.chunk_size < 1:
            raise ValueError(f"the cache's chunk_size must be positive, got {self.chunk_size}")
        self._cache = cache
        self._kv_caches = kv_caches
        self._log = _SparseLog()

    def whole_chunks(self, tokens: int) -> int:
        """The tokens of a prompt of `tokens` that can be stored."""
        return tokens // self.chunk_size * self.chunk_size

    def load(self, prefix: Prefix, announced: int, wait_s: float, cancelled: threading.Event) -> LoadResult:
        """Load as much of `prefix` as the pool holds.

        Where a prefill node has announced `announced` tokens, waits for those, up to `wait_s` or until `cancelled`.
        """
        try:
            return self._load(prefix, announced, wait_s, cancelled)
        except Exception as error:  # noqa: BLE001 - whatever the cache raises, the prompt is computed instead
            self._log.warning("loading from the cache failed, the prompt is computed", error)
            return LoadResult(LoadOutcome.FAILED, 0)

    def store(self, prefix: Prefix, loaded: int) -> bool:
        """Store the chunks of `prefix` from token `loaded` on; False if the cache failed."""
        try:
            mask = torch.arange(len(prefix.tokens)) >= loaded
            self._cache.store(
                prefix.tokens,
                mask,
                kv_caches=self._kv_caches,
                slot_mapping=prefix.slots,
                extra_keys=prefix.extra_keys,
            )
        except Exception as error:  # noqa: BLE001 - whatever the cache raises, serving goes on
            self._log.warning("storing in the cache failed", error)
            return False
        return True

    def _load(self, prefix: Prefix, announced: int, wait_s: float, cancelled: threading.Event) -> LoadResult:
        if not self._cache.available:
            return LoadResult(LoadOutcome.UNAVAILABLE, 0)
        deadline = time.monotonic() + wait_s
        pause = _FIRST_POLL_S
        while True:
            found = self._cache.lookup(prefix.tokens, extra_keys=prefix.extra_keys)
            remaining = deadline - time.monotonic()
            if found >= announced or remaining <= 0 or not self._cache.available:
                break
            if cancelled.wait(min(pause, remaining)):
                break
            pause = min(2 * pause, _LONGEST_POLL_S)
        if cancelled.is_set():
            return LoadResult(LoadOutcome.CANCELLED, 0)
        wanted = self.whole_chunks(min(int(found), len(prefix.tokens)))
        if wanted <= 0:
            return LoadResult(LoadOutcome.NOTHING if self._cache.available else LoadOutcome.UNAVAILABLE, 0)
        loaded = self._cache.retrieve(
            prefix.tokens[:wanted],
            None,
            kv_caches=self._kv_caches,
            slot_mapping=prefix.slots[:wanted],
            extra_keys=prefix.extra_keys,
        )
        tokens = self._run_length(loaded, wanted)
        if tokens:
            return LoadResult(LoadOutcome.HIT, tokens)
        return LoadResult(LoadOutcome.NOTHING if self._cache.available else LoadOutcome.UNAVAILABLE, 0)

    def _run_length(self, loaded: torch.Tensor, wanted: int) -> int:
        """The tokens that `loaded` says are there. ValueError if it is not what `retrieve` promises."""
        if not isinstance(loaded, torch.Tensor) or loaded.dtype != torch.bool or tuple(loaded.shape) != (wanted,):
            raise ValueError(f"retrieve answered {loaded!r:.80}, not a bool tensor of {wanted}")
        tokens = int(loaded.sum())
        if tokens != self.whole_chunks(tokens) or not bool(loaded[:tokens].all()):
            raise ValueError(f"retrieve answered {tokens} tokens that are no run of whole chunks from the first on")
        return tokens


class _SparseLog:
    """At most one line in `_LOG_EVERY_S` seconds, with the number of those left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next = float("-inf")
        self._left_out = 0

    def warning(self, message: str, error: Exception) -> None:
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._left_out += 1
                return
            self._next, left_out, self._left_out = now + _LOG_EVERY_S, self._left_out, 0
        _logger.warning("%s: %s: %s (%d more not shown)", message, type(error).__name__, error, left_out)
