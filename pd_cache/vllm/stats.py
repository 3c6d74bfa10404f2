"""What the connector counts, in vLLM's classes.

`CacheMetrics` counts. With each step, the worker and the scheduler send what was added since the last step to
the API server's process, which adds it up on vLLM's /metrics.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pd_cache.metrics import COUNTERS

_COUNTERS = {family: (family, *described) for family, described in COUNTERS.items()} | {
    "op_seconds_sum": ("op_seconds", ("op",), "Seconds spent in cache operations"),
    "op_seconds_count": ("ops", ("op",), "Cache operations"),
}
"""For each family of `CacheMetrics`: the name of its counter, its labels, and what it counts."""


@dataclasses.dataclass
class CacheStats(KVConnectorStats):
    """`data`: the increments, by `family|label|label`."""

    data: dict[str, float] = dataclasses.field(default_factory=dict)

    def reset(self) -> None:
        """Forgets everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Returns whether nothing was added."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Returns the sum of the two statistics."""
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
