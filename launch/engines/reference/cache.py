"""The engine's view of a cache, and the two things it does with one: load a prompt's prefix, store its chunks.

Both run on worker threads and never raise: if the cache fails in any way, no prefix was found.
"""

from __future__ import annotations

import array
import enum
import functools
import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from pd_cache.blocks import BlockCache, Restored, StoreOutcome, TierChunks
from pd_cache.misses import MissReason
from pd_cache.reports import RequestReport
from pd_cache.sparse_log import SparseLog
from pd_cache.tokens import salt_keys
from pd_cache.tracing import UNTRACED, Tracing

_logger = logging.getLogger(__name__)

_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.020


class LoadOutcome(enum.Enum):
    """How a load ended, for the metrics."""

    HIT = "hit"
    NOTHING = "nothing"
    """Nothing was loaded: it is not there, or the pool did not answer. The cache's own counters show which."""
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    CANCELLED = "cancelled"


class LoadResult(NamedTuple):
    outcome: LoadOutcome
    tokens: int
    """Length of the prompt's prefix whose KV is in the pages now: whole chunks."""
    found: int = 0
    """Length of the prefix that the lookup found, in tokens."""
    reason: MissReason = "error"
    """Why not more was loaded."""
    tiers: TierChunks = TierChunks()
    """The tiers that it was loaded from, in chunks."""


class SurveyedPrompt(NamedTuple):
    """What the cache would find of a prompt."""

    tokens: int
    reason: MissReason
    """Why not more."""


class Prefix:
    """The whole chunks of a prompt, and where they lie in the pages."""

    def __init__(
        self,
        cache: BlockCache,
        tokens: array.array[int],
        blocks: Sequence[int],
        salt: str | None,
        trace: Mapping[str, str] | None = None,
    ) -> None:
        """`blocks` are the blocks of the tokens, in order. The prompt is named once, on the thread that first asks for the names. `trace` is
        the trace context of the request."""
        self.trace = trace
        self.length = len(tokens)
        self._cache = cache
        self._tokens = tokens
        self._blocks = blocks
        self._salt = salt
        self.session = uuid.uuid4().hex
        """The session in which a cache server protects what a lookup found."""
        self.epoch = cache.epoch
        """The epoch of the weights, as last known before anything of the prompt was computed."""

    @functools.cached_property
    def names(self) -> list[bytes]:
        return self._cache.name_chunks(self._tokens, None, salt_keys(self._salt))

    def blocks(self, first: int, end: int) -> Sequence[int]:
        """Returns the blocks of the chunks from `first` to before `end`."""
        per_chunk = self._cache.chunk_size // self._cache.block_size
        return self._blocks[first * per_chunk : end * per_chunk]


class PrefixCache:
    """A `BlockCache` over one engine's pages, with failures turned into misses."""

    def __init__(self, cache: BlockCache, kv_caches: dict[str, torch.Tensor], tracing: Tracing = UNTRACED) -> None:
        self.chunk_size = int(cache.chunk_size)
        if self.chunk_size < 1:
            raise ValueError(f"the cache's chunk_size must be positive, got {self.chunk_size}")
        self._cache = cache
        self._kv_caches = kv_caches
        self._log = SparseLog()
        self._tracing = tracing

    def prefix(
        self,
        prompt: array.array[int],
        blocks: Sequence[int],
        salt: str | None,
        trace: Mapping[str, str] | None = None,
    ) -> Prefix | None:
        """Returns the part of a prompt that the cache can hold; None if there is none. `blocks` are those of the prompt."""
        whole = self.whole_chunks(len(prompt))
        return Prefix(self._cache, prompt[:whole], blocks, salt, trace) if whole else None

    def whole_chunks(self, tokens: int) -> int:
        """Returns how many of a prompt's `tokens` tokens can be stored."""
        return tokens // self.chunk_size * self.chunk_size

    def load(self, prefix: Prefix, announced: int, wait_s: float, cancelled: threading.Event) -> LoadResult:
        """Loads as much of `prefix` as the pool holds.

        If a prefill node has announced `announced` tokens, waits for those, up to `wait_s` or until `cancelled`.
        """
        try:
            result = self._load(prefix, announced, wait_s, cancelled)
            if result.outcome is not LoadOutcome.HIT:
                self._cache.end(
                    prefix.session
                )  # what a lookup found, perhaps too late for us, is not retrieved any more
            return result
        except Exception as error:  # noqa: BLE001 - whatever the cache raises, the prompt is computed instead
            self._warn("loading from the cache failed, the prompt is computed", error)
            return LoadResult(LoadOutcome.FAILED, 0)

    def store(self, prefix: Prefix, loaded: int) -> bool:
        """Stores the chunks of `prefix` from token `loaded` on. Returns False if the cache failed."""
        first = loaded // self.chunk_size
        blocks = prefix.blocks(first, len(prefix.names))
        try:
            with self._tracing.begin("pd_cache.store", prefix.trace, asked=len(prefix.names) - first) as span:
                outcomes = self._cache.store(
                    prefix.names[first:], blocks, kv_caches=self._kv_caches, epoch=prefix.epoch
                )
                if self._tracing.on:
                    span.note(stored=sum(outcome is StoreOutcome.NEW for outcome in outcomes))
        except Exception as error:  # noqa: BLE001 - whatever the cache raises, serving goes on
            self._warn("storing in the cache failed", error)
            return False
        return True

    def _load(self, prefix: Prefix, announced: int, wait_s: float, cancelled: threading.Event) -> LoadResult:
        cache = self._cache
        if not cache.available:
            return LoadResult(LoadOutcome.UNAVAILABLE, 0, reason=cache.survey(prefix.names).reason)
        deadline = time.monotonic() + wait_s
        pause = _FIRST_POLL_S
        with self._tracing.begin("pd_cache.lookup", prefix.trace, asked=prefix.length, announced=announced) as span:
            while True:
                found = cache.survey(prefix.names, session=prefix.session)
                prefix.epoch = cache.epoch
                remaining = deadline - time.monotonic()
                if found.chunks * self.chunk_size >= announced or remaining <= 0 or not cache.available:
                    break
                if cancelled.wait(min(pause, remaining)):
                    break
                pause = min(2 * pause, _LONGEST_POLL_S)
            span.note(found=found.chunks * self.chunk_size, reason=found.reason)
        if cancelled.is_set():
            return LoadResult(LoadOutcome.CANCELLED, 0, reason="deadline")
        wanted = min(int(found.chunks), len(prefix.names))
        restored = Restored(0)
        if wanted > 0:
            with self._tracing.begin("pd_cache.load", prefix.trace, asked=wanted * self.chunk_size) as span:
                restored = cache.restore(
                    prefix.names[:wanted],
                    prefix.blocks(0, wanted),
                    kv_caches=self._kv_caches,
                    session=prefix.session,
                    epoch=prefix.epoch,
                )
                if not isinstance(restored.chunks, int) or not 0 <= restored.chunks <= wanted:
                    raise ValueError(f"restore answered {restored!r:.80} of {wanted} chunks")
                span.note(loaded=restored.chunks * self.chunk_size, reason=restored.reason)
        reason = found.reason if restored.chunks == wanted else restored.reason
        if reason in ("never_stored", "missing") and wanted * self.chunk_size < announced:
            reason = "deadline"  # it may come yet
        outcome = LoadOutcome.HIT
        if not restored.chunks:
            outcome = LoadOutcome.NOTHING if cache.available else LoadOutcome.UNAVAILABLE
        return LoadResult(
            outcome,
            restored.chunks * self.chunk_size,
            wanted * self.chunk_size,
            reason,
            restored.tiers,
        )

    def survey(self, prompt: array.array[int], salt: str | None) -> SurveyedPrompt:
        """Returns how much of a prompt the cache would find now."""
        prefix = self.prefix(prompt, (), salt)
        if prefix is None:
            return SurveyedPrompt(0, "too_short")
        try:
            found = self._cache.survey(prefix.names)
        except Exception as error:  # noqa: BLE001 - whatever the cache raises, it found nothing
            self._warn("looking up in the cache failed", error)
            return SurveyedPrompt(0, "error")
        return SurveyedPrompt(found.chunks * self.chunk_size, found.reason)

    def count(self, report: RequestReport) -> None:
        """Counts what became of a prompt."""
        self._cache.metrics.request(report)

    def _warn(self, what: str, error: Exception) -> None:
        if (times := self._log.admit()) is not None:
            _logger.warning("%s, %d times: %s: %s", what, times, type(error).__name__, error)
