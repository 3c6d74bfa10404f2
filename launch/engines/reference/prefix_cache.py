"""The engine's pages and its cache: it counts the holders of blocks, loads prompts' prefixes, and stores
their chunks.

Loads and stores run on worker threads and never raise: if the cache fails in any way, no prefix was found.
"""

from __future__ import annotations

import array
import functools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from launch.engines.reference.requests import GenerationRequest
from pd_cache.cache import BlockCache
from pd_cache.chunks import salt_keys
from pd_cache.handoff import next_pause
from pd_cache.reasons import Found, Loaded, MissReason, RequestReport, StoreOutcome, TierChunks
from pd_cache.sparse_log import SparseLog
from pd_cache.tracing import UNTRACED, Tracing

_logger = logging.getLogger(__name__)


class LoadResult(NamedTuple):
    """How a load ended."""

    outcome: Literal["hit", "nothing", "unavailable", "failed", "cancelled"]
    """For the metrics. `nothing`: no prefix is there, or the pool did not answer; the cache's own counters
    distinguish these."""
    tokens: int = 0
    """Length of the prompt's prefix whose KV is in the pages now: whole chunks."""
    found: int = 0
    """Length of the prefix that the lookup found, in tokens."""
    reason: MissReason = "error"
    """The reason why no more was loaded."""
    tiers: TierChunks = TierChunks()
    """How many chunks came from each tier."""


class LoadAttempt:
    """A running load. The engine may change `awaited`, and may cancel the load."""

    def __init__(self, blocks: tuple[int, ...], tokens: int, until: float, deadline: float) -> None:
        self.blocks = blocks
        """The blocks that the load may write to."""
        self.deadline = deadline
        """The `time.monotonic()` at which the engine leaves the load behind."""
        self.awaited = tokens, until
        """How many tokens of the prompt to wait for, and the `time.monotonic()` at which the wait ends."""
        self.loaded = 0
        """How many tokens are loaded so far."""
        self.cancelled = threading.Event()


class Prefix:
    """The whole chunks of a prompt, and where they lie in the pages."""

    def __init__(
        self, cache: BlockCache, request: GenerationRequest, tokens: array.array[int], blocks: Sequence[int]
    ) -> None:
        """`blocks` are the blocks of the tokens, in order. The names of the chunks are computed once, on the
        first thread that needs them."""
        self.trace = request.trace
        self.length = len(tokens)
        self._cache = cache
        self._tokens = tokens
        self._blocks = blocks
        self._salt = request.cache_salt
        self.session = uuid.uuid4().hex
        """The session in which a cache server protects what a lookup found."""
        self.label = cache.label
        """The label of the weights before any of the prompt was computed; None if they had none."""

    @property
    def current(self) -> bool:
        """Whether the weights are still those of `label`."""
        return self.label == self._cache.label

    @functools.cached_property
    def names(self) -> list[bytes]:
        return self._cache.name_chunks(self._tokens, None, salt_keys(self._salt))

    def blocks(self, first: int, end: int) -> Sequence[int]:
        """Returns the blocks of the chunks from `first` to before `end`."""
        per_chunk = self._cache.chunk_size // self._cache.block_size
        return self._blocks[first * per_chunk : end * per_chunk]


class PrefixCache:
    """A `BlockCache` over one engine's pages, with failures turned into misses."""

    def __init__(
        self, cache: BlockCache, kv_caches: dict[str, torch.Tensor], tracing: Tracing = UNTRACED
    ) -> None:
        self.chunk_size = cache.chunk_size
        self._cache = cache
        self._kv_caches = kv_caches
        self._log = SparseLog()
        self._tracing = tracing

    def prefix(
        self, request: GenerationRequest, prompt: array.array[int], blocks: Sequence[int]
    ) -> Prefix | None:
        """Returns the part of a request's prompt that the cache can hold; None if there is none. `blocks` are
        those of the prompt."""
        whole = self.whole_chunks(len(prompt))
        return Prefix(self._cache, request, prompt[:whole], blocks) if whole else None

    def whole_chunks(self, tokens: int) -> int:
        """Returns how many tokens can be stored of a prompt of `tokens` tokens."""
        return tokens // self.chunk_size * self.chunk_size

    def load(self, prefix: Prefix, attempt: LoadAttempt) -> LoadResult:
        """Loads what the pool holds of `prefix`, and awaited chunks as they appear, until the attempt is
        cancelled."""
        try:
            result = self._load(prefix, attempt)
            if result.outcome != "hit":
                # nothing more of what the lookup found is retrieved
                self._cache.end(prefix.session)
            return result
        except Exception as error:  # noqa: BLE001 - whatever the cache raises, the prompt is computed instead
            self._warn("loading from the cache failed, the prompt is computed", error)
            return LoadResult("failed")

    def store(self, prefix: Prefix, start: int, end: int) -> bool:
        """Stores the chunks of `prefix` between these tokens. Returns False if the cache failed."""
        first, last = start // self.chunk_size, end // self.chunk_size
        blocks = prefix.blocks(first, last)
        try:
            with self._tracing.begin("pd_cache.store", prefix.trace, asked=last - first) as span:
                outcomes = self._cache.store(
                    prefix.names[first:last], blocks, kv_caches=self._kv_caches, label=prefix.label
                )
                span.note(stored=sum(outcome is StoreOutcome.NEW for outcome in outcomes))
        except Exception as error:  # noqa: BLE001 - whatever the cache raises, serving goes on
            self._warn("storing in the cache failed", error)
            return False
        return True

    def _load(self, prefix: Prefix, attempt: LoadAttempt) -> LoadResult:
        cache, size, chunks, tiers = self._cache, self.chunk_size, 0, TierChunks()
        if not cache.available:
            return LoadResult("unavailable", reason=cache.find(prefix.names).reason)
        while True:
            with self._tracing.begin("pd_cache.lookup", prefix.trace, asked=prefix.length) as span:
                found = self._wait(prefix, chunks, attempt)
                span.note(found=found.chunks * size, announced=attempt.awaited[0], reason=found.reason)
            if attempt.cancelled.is_set():
                return LoadResult("cancelled", reason="deadline")
            if chunks and cache.label != prefix.label:
                return LoadResult("nothing", reason="reset")  # chunks loaded before are of other weights
            prefix.label = cache.label
            wanted = min(found.chunks, len(prefix.names))
            if wanted <= chunks:
                loaded = Loaded(0)
                break
            with self._tracing.begin("pd_cache.load", prefix.trace, asked=(wanted - chunks) * size) as span:
                loaded = cache.load(
                    prefix.names[chunks:wanted],
                    prefix.blocks(chunks, wanted),
                    kv_caches=self._kv_caches,
                    session=prefix.session,
                    label=prefix.label,
                )
                span.note(loaded=loaded.chunks * size, reason=loaded.reason)
            chunks += loaded.chunks
            tiers = TierChunks(*map(sum, zip(tiers, loaded.tiers, strict=True)))
            attempt.loaded = chunks * size
            if chunks < wanted or wanted * size >= attempt.awaited[0]:
                break
        reason = found.reason if chunks == wanted else loaded.reason
        if reason in ("never_stored", "missing") and wanted * size < attempt.awaited[0]:
            reason = "deadline"  # the chunk may still come
        if not chunks:
            return LoadResult("nothing" if cache.available else "unavailable", 0, wanted * size, reason)
        return LoadResult("hit", chunks * size, wanted * size, reason, tiers)

    def _wait(self, prefix: Prefix, chunks: int, attempt: LoadAttempt) -> Found:
        """Waits until more than the first `chunks` chunks of the prompt are there, or the wait is over.
        Returns how much is there."""
        cache, pause = self._cache, next_pause()
        while True:
            found = cache.find(prefix.names, chunks_at_hand=chunks, session=prefix.session)
            tokens, until = attempt.awaited
            remaining = until - time.monotonic()
            over = found.chunks > chunks or found.chunks * self.chunk_size >= tokens or not cache.available
            if over or remaining <= 0 or attempt.cancelled.wait(min(pause, remaining)):
                return found
            pause = next_pause(pause)

    def count(self, report: RequestReport) -> None:
        """Counts the result of a prompt's load."""
        self._cache.metrics.request(report)

    def _warn(self, what: str, error: Exception) -> None:
        if (times := self._log.admit()) is not None:
            _logger.warning("%s, %d times: %s: %s", what, times, type(error).__name__, error)


class BlockPool:
    """The blocks of the paged buffer: free, or in use by one or more holders (a request, a load into them, a
    store out of them).

    A block is free again when its last holder releases it. So while a cache call outlives its request, no
    other request gets its blocks. Thread-safe; never waits.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._free: deque[int] = deque(range(total))
        self._holders: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Returns `count` blocks, held once, or None if there are not that many."""
        with self._lock:
            if count > len(self._free):
                return None
            blocks = tuple(self._free.popleft() for _ in range(count))
            self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a holder to blocks that are in use."""
        with self._lock:
            for block in blocks:
                assert block in self._holders, "blocks were held after they had been given back"
                self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes a holder."""
        with self._lock:
            for block in blocks:
                assert block in self._holders, "blocks were released more often than held"
                self._holders[block] -= 1
                if not self._holders[block]:
                    del self._holders[block]
                    self._free.append(block)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either free or in use, once."""
        with self._lock:
            assert sorted([*self._free, *self._holders]) == list(range(self.total))
