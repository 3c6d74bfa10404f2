"""What the cache counts, as Prometheus metrics, and the log lines that report troubles.

Metrics live in a registry that the caller owns; nothing is registered globally. An outage is never counted as a plain miss:
`pd_cache_troubles_total` has a `reason` for every chunk that could not be stored, and for each that ended a load.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pd_cache.reasons import MissReason
from pd_cache.sparse_log import SparseLog
from transfer.errors import Status

if TYPE_CHECKING:
    from pd_cache.reasons import RequestReport

log = logging.getLogger(__name__)

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class BackendLevels(NamedTuple):
    """What a backend has in use at the moment. Sizes are bytes."""

    staging: int
    """The memory between paged caches and tiers, without what local tiers keep in it."""
    staging_used: int
    staging_forfeited: int
    """What was given up since the start, because a transfer may still write to it."""
    pool_up: bool | None
    """Whether calls go to the pool: its client is open and its breaker closed. None without a pool."""
    segment: str = ""
    """The name of the segment that this process gives to the pool; empty if there is none."""
    segment_bytes: int = 0


class LevelCollector(Collector):
    """Asks the backends of one process for their levels whenever the metrics are read."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], BackendLevels | None]] = []
        self._lock = threading.Lock()

    def add(self, source: Callable[[], BackendLevels | None]) -> None:
        """Asks `source`, too, until it returns None: its backend is closed."""
        with self._lock:
            self._sources.append(source)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._lock:
            sources = list(self._sources)
        levels = {source: source() for source in sources}
        with self._lock:
            self._sources = [source for source in self._sources if levels.get(source, ()) is not None]
        found = [one for one in levels.values() if one is not None]
        if not found:
            return
        if any(one.staging for one in found):
            yield GaugeMetricFamily(
                "pd_cache_staging_bytes",
                "Staging memory, without what local tiers keep in it",
                sum(one.staging for one in found),
            )
            yield GaugeMetricFamily(
                "pd_cache_staging_used_bytes",
                "Staging memory that is leased or quarantined",
                sum(one.staging_used for one in found),
            )
            yield GaugeMetricFamily(
                "pd_cache_staging_forfeited_bytes",
                "Staging memory given up since the start, because a transfer may still write to it",
                sum(one.staging_forfeited for one in found),
            )
        pools = [one.pool_up for one in found if one.pool_up is not None]
        if pools:
            yield GaugeMetricFamily("pd_cache_pool_up", "0 while calls do not go to the pool", float(all(pools)))
        segments = GaugeMetricFamily(
            "pd_cache_segment_bytes", "Memory given to the pool, by the segment's name", labels=["segment"]
        )
        for one in found:
            if one.segment:
                segments.add_metric([one.segment], one.segment_bytes)
        yield segments


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

    def hit(self) -> None:
        """Counts a chunk that was read from this tier."""
        self._hits.inc()

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

    def off_unless(self, up: Callable[[], bool]) -> None:
        """Has the tier count as switched off whenever `up` returns False."""
        self._off.set_function(lambda: float(not up()))


class CacheMetrics:
    """The cache's counters in one registry. `op` is `lookup`, `retrieve` or `store`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        tokens = Counter(
            "pd_cache_tokens",
            "Tokens by what became of them. `stored`: this node found them missing, put them, and the pool holds them; if two nodes put "
            "a chunk at the same time, both count it",
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
            "Prompts, by why the first chunk that was not loaded was not there (docs/troubleshooting.md)",
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
        self._tier_spoiled = Counter(
            "pd_cache_tier_file_errors", "Errors that were one file's alone", ["tier", "error"], registry=registry
        )
        self.levels = LevelCollector()
        """Reports on the backends that are counted here."""
        self.registry.register(self.levels)
        self._log = SparseLog()

    def tokens(self, op: str, outcome: str, count: int) -> None:
        """Counts tokens; outcomes are `requested` and `hit`, `loaded` or `stored`."""
        if count:
            self._tokens[op, outcome].inc(count)

    def moved(self, op: str, nbytes: int, layers: str = "") -> None:
        """Counts payload bytes that arrived. `layers`: the group of layers (`Namespace.group`)."""
        if nbytes:
            self._bytes.labels(op).inc(nbytes)
            if layers:
                self._group_bytes.labels(op, layers).inc(nbytes)

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
        return TierMetrics(self, name)

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
