"""Statistics in vLLM's classes.

The cache counts once, in `CacheMetrics`. The worker and the scheduler send differences to the API server's process, which adds them up on
vLLM's /metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pd_cache.metrics import CacheMetrics

_COUNTERS = {
    "tokens": ("tokens", ("op", "outcome"), "Tokens by what became of them in the cache"),
    "bytes": ("bytes", ("op",), "Payload bytes moved"),
    "group_bytes": (
        "group_bytes",
        ("op", "layers"),
        "Payload bytes moved, by group of layers, for models that have several",
    ),
    "op_seconds_sum": ("op_seconds", ("op",), "Seconds spent in cache operations"),
    "op_seconds_count": ("ops", ("op",), "Cache operations"),
    "troubles": ("troubles", ("op", "reason"), "Chunks not stored or not loaded, by reason"),
    "requests": ("requests", ("reason",), "Prompts, by why the first chunk that was not loaded was not there"),
    "prompt_tokens": ("prompt_tokens", ("source",), "Tokens of prompts: at_hand in vLLM's own cache, loaded, computed"),
    "missed_tokens": (
        "missed_tokens",
        ("reason",),
        "Tokens of prompts computed, by why the first of their chunks was not there",
    ),
    "tier_hits": ("tier_hits", ("tier",), "Chunks read, by tier"),
    "tier_misses": ("tier_misses", ("tier", "reason"), "Chunks that a tier should have had, by why it had not"),
    "tier_evictions": ("tier_evictions", ("tier",), "Chunks evicted, by tier"),
    "tier_healed": ("tier_healed", ("tier",), "Removals of damaged objects that succeeded, by tier"),
    "tier_dropped_writes": ("tier_dropped_writes", ("tier", "reason"), "Chunks not written to a tier, by reason"),
    "tier_failures": ("tier_failures", ("tier", "reason"), "Times that a tier was switched off"),
    "tier_file_errors": ("tier_file_errors", ("tier", "error"), "Errors that were one file's alone"),
}
"""Of each family of `CacheMetrics`: the name of its counter, its labels, and what it counts."""


@dataclass
class CacheStats(KVConnectorStats):
    """`data`: the increments, by `family|label|label`."""

    data: dict[str, float] = field(default_factory=dict)

    def reset(self) -> None:
        """Forgets everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Returns whether nothing was added."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Returns the sum of both."""
        for key, value in other.data.items():
            self.data[key] = self.data.get(key, 0.0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the statistics for vLLM's log line."""

        def total(*key: str) -> float:
            return float(self.data.get("|".join(key), 0.0))

        line: dict[str, int | float] = {
            "requested tokens": int(total("tokens", "lookup", "requested")),
            "hit tokens": int(total("tokens", "lookup", "hit")),
        }
        for op in ("retrieve", "store"):
            seconds = total("op_seconds_sum", op)
            line[f"{op} MB"] = round(total("bytes", op) / 1e6, 1)
            line[f"{op} GB/s"] = round(total("bytes", op) / seconds / 1e9, 2) if seconds else 0.0
        for key, value in sorted(self.data.items()):
            family, _, rest = key.partition("|")
            if family == "troubles":
                line[rest.replace("|", " ")] = int(value)
        return line


class CacheStatsSource:
    """What was counted since the last time."""

    def __init__(self, metrics: CacheMetrics) -> None:
        self._metrics = metrics
        self._last: dict[tuple[str, ...], float] = {}
        self._changes = 0

    def take(self) -> CacheStats | None:
        """Returns the statistics; None if nothing was counted."""
        changes = self._metrics.changes
        if changes == self._changes:
            return None
        self._changes = changes
        totals = self._metrics.totals()
        added = {
            "|".join(key): value - self._last.get(key, 0.0)
            for key, value in totals.items()
            if value != self._last.get(key, 0.0) and key[0] in _COUNTERS
        }
        self._last = totals
        return CacheStats(data=added) if added else None


class PromCacheMetrics(KVConnectorPromMetrics):
    """`vllm:pd_cache_*` counters."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            family: self._counter_cls(
                name=f"vllm:pd_cache_{name}",
                documentation=description,
                labelnames=[*labelnames, *labels],
            )
            for family, (name, labels, description) in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what an engine has counted."""
        for key, value in transfer_stats_data.items():
            family, *labels = key.split("|")
            if family in self._counters and value > 0:
                self._counters[family].labels(*self.per_engine_labelvalues[engine_idx], *labels).inc(value)
