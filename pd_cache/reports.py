"""RequestReport: where the KV of one request's prompt came from, and why not more of it came from the cache. Pure."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Annotated, Generic, TypeVar

import msgspec

from pd_cache.blocks import TierChunks
from pd_cache.misses import MissReason

Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
T = TypeVar("T")

KEY = "report"
"""The key of a request's report in the object `pd_cache` of an answer, see docs/explain.md."""


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one prompt on one node, in tokens. `at_hand + loaded + computed == asked`."""

    asked: Tokens
    """The prompt's length."""
    at_hand: Tokens = 0
    """Tokens that the engine's own cache had."""
    found: Tokens = 0
    """Tokens behind those at hand that the lookup found, in whole chunks."""
    loaded: Tokens = 0
    """Tokens whose KV was loaded and used. At least the last token of a prompt is always computed."""
    memory: Tokens = 0
    """Tokens of the chunks that were read from this host's memory."""
    disk: Tokens = 0
    """The same for this host's disk."""
    pool: Tokens = 0
    """The same for the pool."""
    computed: Tokens = 0
    reason: MissReason = "none"
    """Why the first chunk that was not loaded was not there."""

    @classmethod
    def of(
        cls,
        asked: int,
        chunk_size: int,
        *,
        at_hand: int = 0,
        found: int = 0,
        loaded: int = 0,
        tiers: TierChunks = TierChunks(),  # noqa: B008 - immutable
        reason: MissReason = "none",
    ) -> RequestReport:
        """Returns the report on a prompt of `asked` tokens. `tiers` are chunks, all else is tokens.

        A prompt without a whole chunk gets the reason `too_short`, whatever `reason` says.
        """
        at_hand = min(at_hand, asked)
        loaded = min(loaded, asked - at_hand)
        memory, disk, pool = (chunks * chunk_size for chunks in tiers)
        return cls(
            asked=asked,
            at_hand=at_hand,
            found=found,
            loaded=loaded,
            memory=memory,
            disk=disk,
            pool=pool,
            computed=asked - at_hand - loaded,
            reason="too_short" if asked < chunk_size else reason,
        )

    def line(self) -> str:
        """Returns the report as part of a line of a log."""
        return (
            f"asked={self.asked} at_hand={self.at_hand} found={self.found} loaded={self.loaded} (memory={self.memory} "
            f"disk={self.disk} pool={self.pool}) computed={self.computed} reason={self.reason}"
        )


class RecentReports(Generic[T]):
    """What is known of the last requests, by their ids. Thread-safe."""

    def __init__(self, most: int = 1000) -> None:
        """Keeps the `most` requests that were noted last."""
        self._most = most
        self._known: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, request_id: str, report: T) -> None:
        """Remembers a report. One with the same id is replaced."""
        with self._lock:
            self._known.pop(request_id, None)
            self._known[request_id] = report
            if len(self._known) > self._most:
                self._known.popitem(last=False)

    def get(self, request_id: str) -> T | None:
        """Returns the report of this id; None if there was none, or if it was so long ago that it is forgotten."""
        with self._lock:
            return self._known.get(request_id)
