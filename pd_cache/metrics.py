"""Prometheus metrics of the cache, and log lines about troubles.

Metrics live in a registry that the caller owns; nothing is registered globally. An outage is never counted as
a plain miss: `pd_cache_troubles_total` has a `reason` for every chunk that could not be stored, and for every
chunk that ended a load.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pd_cache.reasons import MissReason
from pd_cache.sparse_log import SparseLog
from transfer.errors import Status

if TYPE_CHECKING:
    from pd_cache.reasons import RequestReport

log = logging.getLogger(__name__)

_OPS = ("lookup", "retrieve", "store")
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "tokens": (
        ("op", "outcome"),
        "Tokens by outcome. `stored`: this node found them missing and put them, and the pool holds them; if two nodes put a chunk at "
        "the same time, both count it",
    ),
    "bytes": (("op",), "Payload bytes moved"),
    "group_bytes": (
        ("op", "layers"),
        "Payload bytes moved, by layer group, for models that have several",
    ),
    "troubles": (("op", "reason"), "Chunks not stored or not loaded, by reason"),
    "requests": (
        ("reason",),
        "Prompts, by the reason why the first chunk that was not loaded was missing (docs/troubleshooting.md)",
    ),
    "prompt_tokens": (("source",), "Tokens of prompts: at_hand in the engine's own cache, loaded, computed"),
    "missed_tokens": (
        ("reason",),
        "Computed tokens of prompts, by the reason why their first chunk was missing",
    ),
    "loads_declined_tokens": (
        (),
        "Tokens that were found or announced but not loaded, because computing them was faster (`not_worth`)",
    ),
    "measured_tokens": (("op",), "Tokens of the loads and steps whose time was measured: `load`, `compute`"),
    "measured_seconds": (
        ("op",),
        "Seconds of the loads and steps whose time was measured: `load`, `compute`",
    ),
    "tier_hits": (("tier",), "Chunks read, by tier"),
    "tier_misses": (("tier", "reason"), "Chunks that a tier was expected to have but lacked, by reason"),
    "tier_evictions": (("tier",), "Chunks evicted"),
    "tier_healed": (("tier",), "Damaged objects that were removed, by tier"),
    "tier_dropped_writes": (("tier", "reason"), "Chunks not written to a tier, by reason"),
    "tier_failures": (("tier", "reason"), "Times that a tier was switched off"),
    "tier_file_errors": (("tier", "error"), "Errors that affected a single file"),
}
"""For each family of counters, its labels, and what it counts."""
HISTOGRAMS = {"op_seconds": (("op",), "Duration of an operation")}
"""For each family of durations, its labels, and what it measures."""


class BackendLevels(NamedTuple):
    """The memory that a backend uses now, in bytes, and whether its pool is up."""

    staging: int
    """The staging memory between paged caches and tiers, without the chunks that local tiers keep in it."""
    staging_used: int
    staging_forfeited: int
    """The memory that was given up since the start, because a transfer may still write to it."""
    pool_up: bool | None
    """Whether calls go to the pool: its client is open and its breaker closed. None without a pool."""
    segment: str = ""
    """The name of the segment that this process gives to the pool; empty if it gives none."""
    segment_bytes: int = 0


class Counts(Collector):
    """All numbers that a process has counted, by family and labels. Prometheus reads the totals; vLLM's
    statistics read the increments since their last read. Thread-safe.

    The durations of an operation are counted as `("op_seconds_sum", op)` and `("op_seconds_count", op)`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: dict[tuple[str, ...], float] = {}
        """The numbers counted before the last `take_added`."""
        self._added: dict[tuple[str, ...], float] = {}
        """The numbers counted since the last `take_added`."""
        self._buckets = {op: [0] * (len(_SECONDS) + 1) for op in _OPS}
        """How many durations of each operation are in each bucket. The last bucket has durations beyond all
        bounds."""
        for op in _OPS:
            self.show("op_seconds_sum", op)
            self.show("op_seconds_count", op)

    def show(self, *key: str) -> None:
        """Makes a counter appear at 0, so that Prometheus sees its first count as an increase."""
        self._before.setdefault(key, 0.0)

    def add(self, *key: str, by: float = 1) -> None:
        """Adds to a counter of `COUNTERS`."""
        if by:
            with self._lock:
                self._added[key] = self._added.get(key, 0.0) + by

    def looked_up(self, asked: int, hit: int) -> None:
        """Counts the tokens that a lookup asked for, and those that it found."""
        with self._lock:
            for outcome, by in (("requested", asked), ("hit", hit)):
                if by:
                    key = ("tokens", "lookup", outcome)
                    self._added[key] = self._added.get(key, 0.0) + by

    def took(self, op: str, seconds: float) -> None:
        """Counts an operation and its duration."""
        with self._lock:
            self._buckets[op][bisect_left(_SECONDS, seconds)] += 1
            for key, by in ((("op_seconds_sum", op), seconds), (("op_seconds_count", op), 1)):
                self._added[key] = self._added.get(key, 0.0) + by

    def totals(self) -> dict[tuple[str, ...], float]:
        """Returns all numbers counted so far."""
        with self._lock:
            return _add(dict(self._before), self._added)

    def take_added(self) -> dict[tuple[str, ...], float]:
        """Returns the numbers counted since the last call. Fast, so that an engine may call this in each
        step."""
        with self._lock:
            added, self._added = self._added, {}
            _add(self._before, added)
        return added

    def collect(self) -> Iterator[Metric]:
        totals = self.totals()
        with self._lock:
            buckets = {op: list(accumulate(counts)) for op, counts in self._buckets.items()}
        for family, (labels, text) in COUNTERS.items():
            counter = CounterMetricFamily(f"pd_cache_{family}", text, labels=labels)
            for (name, *values), total in totals.items():
                if name == family:
                    counter.add_metric(values, total)
            yield counter
        for family, (labels, text) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"pd_cache_{family}", text, labels=labels)
            for op, counts in buckets.items():
                bounds = zip((*map(str, _SECONDS), "+Inf"), counts, strict=True)
                histogram.add_metric([op], list(bounds), totals[f"{family}_sum", op])
            yield histogram


def _add(
    totals: dict[tuple[str, ...], float], added: Mapping[tuple[str, ...], float]
) -> dict[tuple[str, ...], float]:
    """Adds further numbers to totals, and returns the totals."""
    for key, by in added.items():
        totals[key] = totals.get(key, 0.0) + by
    return totals


class LevelCollector(Collector):
    """Asks the backends of a process for their levels when the metrics are read."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], BackendLevels | None]] = []
        self._lock = threading.Lock()

    def add(self, source: Callable[[], BackendLevels | None]) -> None:
        """Also asks `source`, until it returns None because its backend is closed."""
        with self._lock:
            self._sources.append(source)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._lock:
            sources = list(self._sources)
        levels = {source: source() for source in sources}
        with self._lock:
            self._sources = [source for source in self._sources if levels.get(source, ()) is not None]
        found = [level for level in levels.values() if level is not None]
        if not found:
            return
        if any(level.staging for level in found):
            yield GaugeMetricFamily(
                "pd_cache_staging_bytes",
                "Staging memory, without the part in which local tiers keep objects",
                sum(level.staging for level in found),
            )
            yield GaugeMetricFamily(
                "pd_cache_staging_used_bytes",
                "Staging memory that is leased or quarantined",
                sum(level.staging_used for level in found),
            )
            yield GaugeMetricFamily(
                "pd_cache_staging_forfeited_bytes",
                "Staging memory given up since the start, because a transfer may still write to it",
                sum(level.staging_forfeited for level in found),
            )
        pools = [level.pool_up for level in found if level.pool_up is not None]
        if pools:
            yield GaugeMetricFamily(
                "pd_cache_pool_up", "0 while calls do not go to the pool", float(all(pools))
            )
        segments = GaugeMetricFamily(
            "pd_cache_segment_bytes", "Memory given to the pool, by the segment's name", labels=["segment"]
        )
        for level in found:
            if level.segment:
                segments.add_metric([level.segment], level.segment_bytes)
        yield segments


class TierMetrics:
    """The counters of one storage tier. They count chunks unless stated otherwise."""

    def __init__(self, owner: CacheMetrics, tier: str) -> None:
        self.tier = tier
        self.counts = owner.counts
        self._say = owner.say
        self._bytes = owner._tier_bytes.labels(tier)
        self._off = owner._tier_off.labels(tier)
        for family in ("tier_hits", "tier_evictions", "tier_healed"):
            owner.counts.show(family, tier)

    def hit(self) -> None:
        """Counts a chunk that was read from this tier."""
        self.counts.add("tier_hits", self.tier)

    def missed(self, reason: str) -> None:
        """Counts a chunk that this tier should have had according to its own index; the next tier was
        asked."""
        self.counts.add("tier_misses", self.tier, reason)
        self._say(f"tier {self.tier}", reason, 1, unit="chunks not read")

    def holds(self, nbytes: int) -> None:
        """Sets the number of bytes that the tier holds now."""
        self._bytes.set(nbytes)

    def evicted(self, chunks: int) -> None:
        """Counts chunks that were evicted to make room for others."""
        self.counts.add("tier_evictions", self.tier, by=chunks)

    def dropped(self, reason: str, chunks: int = 1) -> None:
        """Counts writes that did not happen."""
        if chunks:
            self.counts.add("tier_dropped_writes", self.tier, reason, by=chunks)
            self._say(f"tier {self.tier}", reason, chunks, unit="writes dropped")

    def healed(self) -> None:
        """Counts a damaged object that was removed, so that it can be written again."""
        self.counts.add("tier_healed", self.tier)
        self._say(f"tier {self.tier}", "damaged", 1, unit="objects removed, to be stored again")

    def spoiled(self, what: str, error: str, detail: str) -> None:
        """Counts a file that could not be read, written or deleted because of an `error` that affects only
        this file."""
        self.counts.add("tier_file_errors", self.tier, error)
        self._say(f"tier {self.tier}: {what} failed", error, 1, detail, "files")

    def switched_off(self, reason: str) -> None:
        """Notes that the tier failed and is left alone for a while, or that it can only be read."""
        self._off.set(1)
        self.counts.add("tier_failures", self.tier, reason)

    def switched_on(self) -> None:
        """Notes that the tier is in use."""
        self._off.set(0)


class CacheMetrics:
    """The cache's counters in one registry. `op` is `lookup`, `retrieve` or `store`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.counts = Counts()
        self.registry.register(self.counts)
        for op, outcome in (("lookup", "hit"), ("retrieve", "loaded"), ("store", "stored")):
            self.counts.show("tokens", op, "requested")
            self.counts.show("tokens", op, outcome)
        for reason in get_args(MissReason):
            self.counts.show("requests", reason)
            self.counts.show("missed_tokens", reason)
        self._tier_bytes = Gauge(
            "pd_cache_tier_bytes", "Bytes held, by tier", ["tier"], registry=self.registry
        )
        self._tier_off = Gauge(
            "pd_cache_tier_off", "1 while a tier is switched off", ["tier"], registry=self.registry
        )
        self.levels = LevelCollector()
        """The levels of the backends that are counted here."""
        self.registry.register(self.levels)
        self._log = SparseLog()

    def tokens(self, op: str, outcome: str, count: int) -> None:
        """Counts tokens; outcomes are `requested` and `hit`, `loaded` or `stored`."""
        self.counts.add("tokens", op, outcome, by=count)

    def moved(self, op: str, nbytes: int, layers: str = "") -> None:
        """Counts payload bytes that arrived. `layers`: the group of layers (`Namespace.group`)."""
        self.counts.add("bytes", op, by=nbytes)
        if layers:
            self.counts.add("group_bytes", op, layers, by=nbytes)

    def request(self, report: RequestReport) -> None:
        """Counts a prompt by its report."""
        self.counts.add("requests", report.reason)
        for source in ("at_hand", "loaded", "computed"):
            self.counts.add("prompt_tokens", source, by=getattr(report, source))
        self.counts.add("missed_tokens", report.reason, by=report.computed)

    def trouble(self, op: str, reason: str, chunks: int = 1, *, detail: str = "") -> None:
        """Counts chunks that failed for `reason`, and logs it at most once in ten seconds for each reason."""
        if not chunks:
            return
        self.counts.add("troubles", op, reason, by=chunks)
        self.say(op, reason, chunks, detail)

    def say(self, what: str, reason: str, chunks: int, detail: str = "", unit: str = "chunks") -> None:
        """Writes a log line, at most one in ten seconds for each pair of subject and reason."""
        total = self._log.admit((what, reason), chunks)
        if total is not None:
            log.warning("%s: %d %s: %s%s", what, total, unit, reason, detail and f" ({detail})")

    def tier(self, name: str) -> TierMetrics:
        """Returns the counters of one storage tier."""
        return TierMetrics(self, name)

    def totals(self) -> dict[tuple[str, ...], float]:
        """Returns all numbers counted so far: (family, labels...) -> value. A duration has a sum and a count,
        and no buckets."""
        return self.counts.totals()

    def take_added(self) -> dict[tuple[str, ...], float]:
        """Returns the numbers counted since the last call, as `totals` does. Fast, so that an engine may call
        this in each step."""
        return self.counts.take_added()

    def outages(self, op: str, statuses: Sequence[Status]) -> None:
        """Counts every status that is neither OK nor a plain miss."""
        if statuses.count(Status.OK) + statuses.count(Status.MISSING) < len(statuses):
            for status, chunks in collections.Counter(statuses).items():
                if status is not Status.OK and status is not Status.MISSING:
                    self.trouble(op, status.value, chunks)

    @contextmanager
    def timed(self, op: str) -> Iterator[None]:
        """Counts the duration of the `with` block, however it ends."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.counts.took(op, time.perf_counter() - start)
