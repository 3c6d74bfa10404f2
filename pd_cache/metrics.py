"""What the cache counts, as Prometheus metrics, and the log lines that report troubles.

Metrics live in a registry that the caller owns; nothing is registered globally. An outage is never counted as a plain miss:
`pd_cache_troubles_total` has a `reason` for every chunk that could not be stored, and for each that ended a load.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pd_cache.misses import MissReason
from pd_cache.sparse_log import SparseLog
from transfer.errors import Status

if TYPE_CHECKING:
    from pd_cache.reports import RequestReport
    from transfer.staging import StagingPool

log = logging.getLogger(__name__)

_MOST_GROUPS = 64
"""The most groups of layers whose bytes are counted apart; those of further ones are counted as of `others`. Engines choose their names, and
a cache server never forgets a counter."""
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


POOL_UP = "1 while calls go to the pool, 0 while its breaker is open or its client is not open yet"


class WatchedPool(Protocol):
    """A pool whose state is shown as it is at each scrape."""

    @property
    def available(self) -> bool:
        """Whether calls go to the pool now."""

    @property
    def staging(self) -> StagingPool:
        """The memory through which its chunks pass."""


class TierMetrics:
    """The counters of one storage tier. They count chunks unless stated otherwise."""

    def __init__(self, owner: CacheMetrics, tier: str) -> None:
        self.tier = tier
        self._owner = owner
        self._hits = owner._tier_hits.labels(tier)
        self._bytes = owner._tier_bytes.labels(tier)
        self._evictions = owner._tier_evictions.labels(tier)
        self._off = owner._tier_off.labels(tier)
        # shown from the start, so that the first event is an increase
        owner._tier_healed.labels(tier)
        self._pools: weakref.WeakSet[WatchedPool] = weakref.WeakSet()

    def watch(self, pool: WatchedPool) -> None:
        """Shows the pool's state and how much of its staging memory is in use, as long as the pool lives and until `unwatch`."""
        self._pools.add(pool)
        pools = self._pools
        self._owner._pool_up.labels(self.tier).set_function(lambda: all(one.available for one in list(pools)))
        for gauge, bytes_of in (
            (self._owner._staging_used, lambda staging: staging.taken * staging.stride_of(staging.slot_bytes)),
            (self._owner._staging_size, lambda staging: staging.slots * staging.stride_of(staging.slot_bytes)),
            (self._owner._staging_lost, lambda staging: staging.forfeited_bytes),
        ):
            gauge.labels(self.tier).set_function(_total_of(pools, bytes_of))

    def unwatch(self, pool: WatchedPool) -> None:
        """Forgets a pool that is closed."""
        self._pools.discard(pool)

    def hit(self, chunks: int = 1) -> None:
        """Counts chunks that were read from this tier."""
        self._hits.inc(chunks)

    def missed(self, reason: str) -> None:
        """Counts a chunk that this tier should have had according to its own index; the next tier was asked."""
        self._owner._tier_misses.labels(self.tier, reason).inc()
        self._owner.say(f"tier {self.tier}", reason, 1, "", "chunks not read")

    def holds(self, nbytes: int) -> None:
        """Sets the number of bytes that the tier holds now."""
        self._bytes.set(nbytes)

    def evicted(self, chunks: int) -> None:
        """Counts chunks that were evicted to make room for others."""
        if chunks:
            self._evictions.inc(chunks)

    def dropped(self, reason: str, chunks: int = 1) -> None:
        """Counts writes that did not happen."""
        if chunks:
            self._owner._tier_dropped.labels(self.tier, reason).inc(chunks)
            self._owner.say(f"tier {self.tier}", reason, chunks, "", "writes dropped")

    def healed(self) -> None:
        """Counts a damaged object that was removed, so that it can be written again."""
        self._owner._tier_healed.labels(self.tier).inc()
        self._owner.say(f"tier {self.tier}", "damaged", 1, "", "objects removed, to be stored again")

    def ignored(self, kind: str, files: int) -> None:
        """Counts files found at the start that are not whole objects of ours."""
        if files:
            self._owner._tier_ignored.labels(self.tier, kind).inc(files)

    def budget(self, nbytes: int) -> None:
        """Sets the number of bytes that the tier may hold now."""
        self._owner._tier_budget.labels(self.tier).set(nbytes)

    def shrunk(self, nbytes: int, detail: str) -> None:
        """Sets the budget to `nbytes`, because the file system has no room for the configured one."""
        self.budget(nbytes)
        self._owner.say(f"tier {self.tier}", "evicted, the file system is full", 1, detail)

    def spoiled(self, what: str, error: str, detail: str) -> None:
        """Counts a file that could not be read, written or deleted because of an `error` that affects only this file."""
        self._owner._tier_spoiled.labels(self.tier, error).inc()
        self._owner.say(f"tier {self.tier}: {what} failed", error, 1, detail, "files")

    def switched_off(self, reason: str) -> None:
        """Notes that the tier failed and is left alone for a while, or can only be read."""
        self._off.set(1)
        self._owner._tier_failures.labels(self.tier, reason).inc()

    def switched_on(self) -> None:
        """Notes that the tier is in use."""
        self._off.set(0)


def _total_of(pools: weakref.WeakSet[WatchedPool], of: Callable[[StagingPool], int]) -> Callable[[], int]:
    return lambda: sum(of(one.staging) for one in list(pools))


class CacheMetrics:
    """The cache's counters in one registry. `op` is `lookup`, `retrieve` or `store`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        tokens = Counter(
            "pd_cache_tokens",
            "Tokens by what became of them. `stored`: this node found them missing, put them, and the pool holds them; if two nodes put "
            "a chunk at the same time, both count it. `by_layers`: those of `loaded` that arrived layer by layer",
            ["op", "outcome"],
            registry=self.registry,
        )
        self._tokens = {
            (op, outcome): tokens.labels(op, outcome)
            for op, outcome in (
                ("lookup", "requested"),
                ("lookup", "hit"),
                ("retrieve", "requested"),
                ("retrieve", "loaded"),
                ("retrieve", "by_layers"),
                ("store", "requested"),
                ("store", "stored"),
            )
        }
        self._bytes = Counter("pd_cache_bytes", "Payload bytes moved", ["op"], registry=self.registry)
        self._group_bytes = Counter(
            "pd_cache_group_bytes",
            "Payload bytes moved, by group of layers, for models that have several",
            ["op", "layers"],
            registry=self.registry,
        )
        self._groups: set[str] = set()
        seconds = Histogram(
            "pd_cache_op_seconds", "Duration of an operation", ["op"], buckets=_SECONDS, registry=self.registry
        )
        self._seconds = {op: seconds.labels(op) for op in ("lookup", "retrieve", "store")}
        self._troubles = Counter(
            "pd_cache_troubles",
            "Chunks not stored or not loaded, by reason",
            ["op", "reason"],
            registry=self.registry,
        )
        self._requests = Counter(
            "pd_cache_requests",
            "Prompts, by why the first chunk that was not loaded was not there (docs/explain.md)",
            ["reason"],
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "pd_cache_prompt_tokens",
            "Tokens of prompts: at_hand in the engine's own cache, loaded, computed",
            ["source"],
            registry=self.registry,
        )
        self._missed_tokens = Counter(
            "pd_cache_missed_tokens",
            "Tokens of prompts that were computed, by why the first of their chunks was not there",
            ["reason"],
            registry=self.registry,
        )
        for reason in get_args(MissReason):  # shown from the start, so that the first of each is an increase
            self._requests.labels(reason)
            self._missed_tokens.labels(reason)
        self.changes = 0
        """Increases whenever something was counted."""
        tier, registry = ["tier"], self.registry
        self._tier_hits = Counter("pd_cache_tier_hits", "Chunks read, by tier", tier, registry=registry)
        self._tier_misses = Counter(
            "pd_cache_tier_misses",
            "Chunks that a tier turned out not to have, by reason",
            ["tier", "reason"],
            registry=registry,
        )
        self._tier_bytes = Gauge("pd_cache_tier_bytes", "Bytes held, by tier", tier, registry=registry)
        self._tier_evictions = Counter("pd_cache_tier_evictions", "Chunks evicted", tier, registry=registry)
        self._tier_healed = Counter(
            "pd_cache_tier_healed", "Removals of damaged objects that succeeded, by tier", tier, registry=registry
        )
        self._tier_dropped = Counter(
            "pd_cache_tier_dropped_writes",
            "Chunks not written to a tier, by reason",
            ["tier", "reason"],
            registry=registry,
        )
        self._tier_off = Gauge("pd_cache_tier_off", "1 while a tier is switched off", tier, registry=registry)
        self._tier_failures = Counter(
            "pd_cache_tier_failures", "Times that a tier was switched off", ["tier", "reason"], registry=registry
        )
        self._tier_budget = Gauge(
            "pd_cache_tier_budget_bytes", "Bytes that a disk tier may hold, as far as they fit", tier, registry=registry
        )
        self._tier_spoiled = Counter(
            "pd_cache_tier_file_errors", "Errors that were one file's alone", ["tier", "error"], registry=registry
        )
        self._tier_ignored = Counter(
            "pd_cache_tier_ignored_files", "Files that are no whole objects", ["tier", "kind"], registry=registry
        )
        self._pool_up = Gauge("pd_cache_pool_up", POOL_UP, tier, registry=registry)
        self._staging_used = Gauge(
            "pd_cache_staging_used_bytes",
            "Staging memory that is leased or quarantined, with what a local tier keeps there",
            tier,
            registry=registry,
        )
        self._staging_size = Gauge("pd_cache_staging_bytes", "Staging memory", tier, registry=registry)
        self._staging_lost = Gauge(
            "pd_cache_staging_forfeited_bytes",
            "Staging memory given up since the start, because a transfer may still write to it",
            tier,
            registry=registry,
        )
        self._tiers: dict[str, TierMetrics] = {}
        self._log = SparseLog()
        self._lock = threading.Lock()

    def tokens(self, op: str, outcome: str, count: int) -> None:
        """Counts tokens; outcomes are `requested` and `hit`, `loaded` (of these `by_layers`) or `stored`."""
        if count:
            self._tokens[op, outcome].inc(count)

    def moved(self, op: str, nbytes: int, layers: str = "") -> None:
        """Counts payload bytes that arrived. `layers`: the group of layers (`Namespace.group`)."""
        if nbytes:
            self._bytes.labels(op).inc(nbytes)
            if layers:
                with self._lock:
                    if len(self._groups) < _MOST_GROUPS:
                        self._groups.add(layers)
                self._group_bytes.labels(op, layers if layers in self._groups else "others").inc(nbytes)

    def request(self, report: RequestReport) -> None:
        """Counts what became of a prompt."""
        self.changes += 1
        self._requests.labels(report.reason).inc()
        for source in ("at_hand", "loaded", "computed"):
            if count := getattr(report, source):
                self._prompt_tokens.labels(source).inc(count)
        self._missed_tokens.labels(report.reason).inc(report.computed)

    def trouble(self, op: str, reason: str, chunks: int = 1, *, detail: str = "") -> None:
        """Counts chunks that ended in `reason`, and logs it at most once in ten seconds for each reason."""
        if not chunks:
            return
        self.changes += 1
        self._troubles.labels(op, reason).inc(chunks)
        self.say(op, reason, chunks, detail)

    def say(self, what: str, reason: str, chunks: int, detail: str = "", unit: str = "chunks") -> None:
        """Write a log line, at most one in ten seconds for each pair of subject and reason."""
        total = self._log.admit((what, reason), chunks)
        if total is not None:
            log.warning("%s: %d %s: %s%s", what, total, unit, reason, detail and f" ({detail})")

    def tier(self, name: str) -> TierMetrics:
        """Returns the counters of one storage tier."""
        with self._lock:
            if name not in self._tiers:
                self._tiers[name] = TierMetrics(self, name)
            return self._tiers[name]

    def totals(self) -> dict[tuple[str, ...], float]:
        """Returns everything counted so far: (family, labels...) -> value. A duration appears as sum and number, without buckets."""
        found: dict[tuple[str, ...], float] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_total", "_sum", "_count")):
                    continue
                name = sample.name.removesuffix("_total").removeprefix("pd_cache_")
                key = (name, *sample.labels.values())
                found[key] = sample.value
        return found

    def outages(self, op: str, statuses: Sequence[Status]) -> None:
        """Counts every status that is neither OK nor a plain miss."""
        if statuses.count(Status.OK) + statuses.count(Status.MISSING) < len(statuses):
            for status, chunks in collections.Counter(statuses).items():
                if status is not Status.OK and status is not Status.MISSING:
                    self.trouble(op, status.value, chunks)

    @contextmanager
    def timed(self, op: str) -> Iterator[None]:
        """Observes the duration of the block, however it ends."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[op].observe(time.perf_counter() - start)
            self.changes += 1
