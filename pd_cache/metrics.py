"""What the cache counts, in Prometheus' terms, and the log lines that go with troubles.

Metrics live in a registry that the caller owns; nothing is registered globally. An outage is never counted as a plain
miss: `pd_cache_troubles_total` has a `reason` for every chunk that could not be stored, and for each that ended a load.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram

from transfer.errors import Status

log = logging.getLogger(__name__)

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_LOG_INTERVAL = 10.0


class CacheMetrics:
    """The cache's counters in one registry. `op` is `lookup`, `retrieve` or `store`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        tokens = Counter("pd_cache_tokens", "Tokens by what became of them", ["op", "outcome"], registry=self.registry)
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
        self.changes = 0
        """Goes up whenever something was counted."""
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def tokens(self, op: str, outcome: str, count: int) -> None:
        """Count tokens; outcomes are `requested` and `hit`, `loaded` or `stored`."""
        if count:
            self._tokens[op, outcome].inc(count)

    def moved(self, op: str, nbytes: int) -> None:
        """Count payload bytes that really arrived."""
        if nbytes:
            self._bytes.labels(op).inc(nbytes)

    def trouble(self, op: str, reason: str, chunks: int = 1, *, detail: str = "") -> None:
        """Count chunks that ended in `reason`, and say so in the log, at most once in ten seconds for each reason."""
        if not chunks:
            return
        self.changes += 1
        self._troubles.labels(op, reason).inc(chunks)
        now = time.monotonic()
        with self._lock:
            last, silent = self._logged.get((op, reason), (-_LOG_INTERVAL, 0))
            if now - last < _LOG_INTERVAL:
                self._logged[op, reason] = (last, silent + chunks)
                return
            self._logged[op, reason] = (now, 0)
        log.warning("%s: %d chunks: %s%s", op, chunks + silent, reason, detail and f" ({detail})")

    def totals(self) -> dict[tuple[str, ...], float]:
        """Everything counted so far: (family, labels...) -> value; of durations the sum and the number, no buckets."""
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
        """Count every status that is neither OK nor a plain miss."""
        if statuses.count(Status.OK) + statuses.count(Status.MISSING) < len(statuses):
            for status, chunks in collections.Counter(statuses).items():
                if status is not Status.OK and status is not Status.MISSING:
                    self.trouble(op, status.value, chunks)

    @contextmanager
    def timed(self, op: str) -> Iterator[None]:
        """Observe the duration of the body, however it ends."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[op].observe(time.perf_counter() - start)
            self.changes += 1
