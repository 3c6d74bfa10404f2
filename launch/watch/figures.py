"""Reads the nodes' metrics: the state of the cache at one moment and over time.

`read_samples` reads Prometheus' text. `read_node` turns it into a `NodeReading`, with the cache's terms in
place of the metrics' names. A `NodeHistory` computes rates, shares and quantiles from successive readings. If
a counter has become smaller, it was reset to zero, so its whole present value is new.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from operator import itemgetter

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pd_cache.decoding import one_line

TIMINGS = ("lookup", "retrieve", "store", "first token", "first byte")
LONGEST_WINDOW_S = 60.0
"""The window of shares and quantiles."""

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""The labels and the value of each sample, by the sample's name without vLLM's prefix."""
Key = tuple[str, str]

_VLLM = "vllm:"
"""The prefix of all metrics, ours included, that vLLM exports."""
_OURS = (
    "pd_cache_", "vllm:pd_cache_", "vllm:num_requests_", "vllm:time_to_first_token_seconds_bucket", "process_start_time_seconds", "master_"
)  # fmt: skip
_MOST = 2.0**62
"""An upper bound of every number that a node reports: counts, seconds and bytes."""
TIERS = {"local": "memory", "disk": "disk", "mooncake": "pool"}
"""The tiers' names for people, by kind."""
_HISTOGRAMS = {
    "first token": ("pd_cache_reference_ttft_seconds_bucket", "time_to_first_token_seconds_bucket"),
    "first byte": ("pd_cache_proxy_first_byte_seconds_bucket",),
}
"""The timings that are no operations of the cache."""
QUEUED = ("pd_cache_reference_queue_length", "num_requests_waiting")
RUNNING = (
    "pd_cache_reference_running",
    "num_requests_running",
    "pd_cache_proxy_requests_running",
    "pd_cache_server_running",
)


def read_samples(text: str, names: tuple[str, ...] = _OURS) -> Samples:
    """Returns the samples whose names begin with one of `names`: by default those that are used here, of the
    families that pd-cache, vLLM and Mooncake's master export. Leaves out values that cannot be counts. Makes
    labels printable.

    Raises ValueError for text that Prometheus could not read.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        # keeps the first line whatever it is, so that a page without metrics raises
        if line.startswith(names) or (not lines and line.strip() and line[0] != "#"):
            lines.append(line.rstrip("\r"))
    found: Samples = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                if sample.name.startswith(names) and 0 <= sample.value < _MOST:
                    name = sample.name.removeprefix(_VLLM)
                    labels = {label: one_line(value) for label, value in sample.labels.items()}
                    found.setdefault(name, []).append((labels, float(sample.value)))
    except (ValueError, LookupError) as error:
        raise ValueError(f"not a line of Prometheus' metrics: {one_line(str(error))}") from None
    return found


def total(samples: Samples, name: str) -> float:
    """Returns the sum of all samples of a name; 0 if there are none."""
    return sum(value for _, value in samples.get(name, ()))


# --- one moment ---------------------------------------------------------------------------------------------


class NodeReading(msgspec.Struct, frozen=True, kw_only=True):
    """A node's metrics at one moment. Gauges are None if the node does not export them."""

    at: float
    """When the metrics were read, on a monotonic clock."""
    started: float | None = None
    """When the process started, in seconds since 1970."""
    counts: dict[Key, float] = {}
    """Counters, by kind and label: `lookups`, `evictions`, `bytes` (by operation), `tokens` (by source),
    `missed` (tokens by reason), and each of `TIMINGS`: how many took at most the label's seconds."""
    queued: float | None = None
    running: float | None = None
    staging: float | None = None
    staging_used: float | None = None
    pool_up: bool | None = None
    tiers_off: tuple[str, ...] = ()
    nodes_down: int = 0
    """For a proxy: how many nodes it skips."""
    tier_bytes: dict[str, float] = {}
    errors: dict[str, float] = {}
    """Counted troubles, by operation (or hop, or tier) and reason."""
    segments: tuple[str, ...] = ()
    """The names of the segments that it gives to the pool."""

    @property
    def troubles(self) -> list[str]:
        """Returns the node's own reports of what does not work."""
        found = []
        if self.pool_up is False:
            found.append("calls do not go to the pool: its breaker is open, or its client is not open yet")
        if self.tiers_off:
            found.append(f"switched off: {', '.join(self.tiers_off)}")
        if self.nodes_down:
            found.append(f"skips {self.nodes_down} of its nodes")
        return found


def read_node(samples: Samples, at: float) -> NodeReading:
    """Returns the reading that the samples of a node give."""
    started = samples.get("process_start_time_seconds")
    up = samples.get("pd_cache_pool_up")
    operations = _by(samples, "pd_cache_ops_total", "op") | _by(samples, "pd_cache_op_seconds_count", "op")
    evictions = gauge(samples, "pd_cache_tier_evictions_total", "master_evicted_key_count") or 0.0
    tiers = _by(samples, "pd_cache_tier_bytes", "tier")
    if "master_allocated_bytes" in samples:
        tiers["pool"] = total(samples, "master_allocated_bytes")
    errors = {
        f"{labels.get('op') or labels.get('hop') or labels.get('tier')}.{labels.get('reason')}": value
        for name in (
            "pd_cache_troubles_total",
            "pd_cache_proxy_hop_failures_total",
            "pd_cache_tier_failures_total",
        )
        for labels, value in samples.get(name, ())
        if value and labels.get("reason") != "missing"
    }
    if refused := total(samples, "master_put_start_alloc_failures_total"):
        errors["store.no_space"] = refused
    families = {
        "lookups": {"": operations.get("lookup", 0.0)},
        "evictions": {"": evictions},
        "bytes": _by(samples, "pd_cache_bytes_total", "op"),
        "tokens": _by(samples, "pd_cache_prompt_tokens_total", "source"),
        "missed": _by(samples, "pd_cache_missed_tokens_total", "reason"),
        **{timing: _buckets(samples, timing) for timing in TIMINGS},
    }
    return NodeReading(
        at=at,
        started=started[0][1] if started else None,
        counts={(kind, label): value for kind, found in families.items() for label, value in found.items()},
        queued=gauge(samples, *QUEUED),
        running=gauge(samples, *RUNNING),
        staging=gauge(samples, "pd_cache_staging_bytes"),
        staging_used=gauge(samples, "pd_cache_staging_used_bytes"),
        pool_up=all(value > 0 for _, value in up) if up else None,
        tiers_off=tuple(tier for tier, off in _by(samples, "pd_cache_tier_off", "tier").items() if off),
        # a node of the role both has two samples, one for each hop
        nodes_down=len(
            {labels.get("node") for labels, up in samples.get("pd_cache_proxy_node_up", ()) if up == 0}
        ),
        tier_bytes=tiers,
        errors=errors,
        segments=tuple(_by(samples, "pd_cache_segment_bytes", "segment")),
    )


def _by(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Adds up the samples of a name by one of their labels."""
    found: dict[str, float] = {}
    for labels, value in samples.get(name, ()):
        if label in labels:
            text = labels[label]
            if label == "tier":
                text = TIERS.get(text.partition("-")[0], text)  # a second tier of a kind is called `disk-1`
            found[text] = found.get(text, 0.0) + value
    return found


def gauge(samples: Samples, *names: str) -> float | None:
    """Returns the sum of all samples of these names; None if there are none."""
    present = [name for name in names if name in samples]
    return sum(total(samples, name) for name in present) if present else None


def _buckets(samples: Samples, timing: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _HISTOGRAMS.get(timing, ("pd_cache_op_seconds_bucket",)):
        for labels, value in samples.get(name, ()):
            if labels.get("op", timing) == timing:
                with contextlib.suppress(ValueError):  # a node's mistake must not end `status`
                    bound = float(labels.get("le", ""))
                    if not math.isnan(bound):
                        found[str(bound)] = found.get(str(bound), 0.0) + value
    return found


# --- over time ----------------------------------------------------------------------------------------------


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """A node's recent work. Unless stated otherwise, these are rates a second over the last interval; None if
    unknown."""

    load: float = 0.0
    """Bytes that the node loaded."""
    store: float = 0.0
    """Bytes that the node stored."""
    lookups: float = 0.0
    evictions: float = 0.0
    """Chunks that were evicted: at a node from its own tiers, at a master from the pool."""
    hit: float | None = None
    """The hit rate: the share of the last minute's prompt tokens that was loaded; None without prompts.
    Tokens in the engine's own cache are no hits."""
    quantiles: dict[str, tuple[float, float]] = {}
    """The median and the 99th percentile of the last minute, in seconds, by timing. Infinite beyond the last
    bucket."""
    missed: tuple[tuple[str, float], ...] = ()
    """The reasons of the last minute for tokens that were computed, each with their number, the most tokens
    first."""


def shown_age(seconds: float) -> str:
    """Returns a duration in the past as text for people."""
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )


class Increment(msgspec.Struct, frozen=True):
    """The increments of the counters between two readings."""

    at: float
    seconds: float
    counts: dict[Key, float]

    def rate(self, key: Key) -> float:
        return self.counts.get(key, 0.0) / self.seconds


class NodeHistory:
    """The last minute's readings of one node, as increments."""

    def __init__(self, since_start: bool = False) -> None:
        """`since_start`: counts from before the first reading belong to the last minute, too."""
        self.last: NodeReading | None = None
        self._since_start = since_start
        self._steps: list[Increment] = []

    def add(self, reading: NodeReading) -> None:
        """Takes in the next reading."""
        before, self.last = self.last, reading
        if before is None:
            if self._since_start:
                seconds = math.inf if reading.started is None else max(1.0, time.time() - reading.started)
                self._steps.append(Increment(reading.at, seconds, reading.counts))
            return
        counts = {
            key: value - known if value >= (known := before.counts.get(key, 0.0)) else value
            for key, value in reading.counts.items()
        }
        self._steps = [*self.recent(reading.at), Increment(reading.at, reading.at - before.at, counts)]

    def recent(self, now: float) -> list[Increment]:
        """Returns the increments of the last minute."""
        return [step for step in self._steps if now - step.at <= LONGEST_WINDOW_S]

    def rates(self, now: float) -> Rates | None:
        """Returns the node's recent work; None before its second reading (with `since_start`, before its
        first)."""
        if not self._steps:
            return None
        recent, latest, quantiles = self.recent(now), self._steps[-1], dict[str, tuple[float, float]]()
        for name in TIMINGS:
            counted = {float(bound): count for bound, count in _sums(recent, name).items()}
            if not math.isnan(median := quantile(counted, 0.5)):
                quantiles[name] = median, quantile(counted, 0.99)
        return Rates(
            load=latest.rate(("bytes", "retrieve")),
            store=latest.rate(("bytes", "store")),
            lookups=latest.rate(("lookups", "")),
            evictions=latest.rate(("evictions", "")),
            hit=hit_rate(recent),
            quantiles=quantiles,
            missed=_missed(recent),
        )


def hit_rate(steps: Iterable[Increment]) -> float | None:
    """Returns the hit rate of the prompts of these increments together; None without prompts."""
    tokens = _sums(steps, "tokens")
    asked = sum(tokens.values())
    return tokens.get("loaded", 0.0) / asked if asked else None


def _sums(steps: Iterable[Increment], kind: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for step in steps:
        for (of, label), value in step.counts.items():
            if of == kind:
                found[label] = found.get(label, 0.0) + value
    return found


def quantile(counted: Mapping[float, float], part: float) -> float:
    """Returns the value below which the share `part` of the observations lies. Interpolates linearly within a
    bucket, as Prometheus' `histogram_quantile` does. `counted`: for each bound, how many observations were at
    most as large. Infinite in the bucket without a bound, NaN without observations."""
    bounds = sorted(counted)
    if not bounds or counted[bounds[-1]] <= 0:
        return math.nan
    wanted = part * counted[bounds[-1]]
    below, start = 0.0, 0.0
    for bound in bounds:
        upto = counted[bound]
        if upto >= wanted and upto > below:
            return bound if math.isinf(bound) else start + (bound - start) * (wanted - below) / (upto - below)
        below, start = upto, bound
    return bounds[-1]


def _missed(steps: list[Increment]) -> tuple[tuple[str, float], ...]:
    tokens = _sums(steps, "missed")
    counted = [(reason, count) for reason, count in tokens.items() if count and reason != "none"]
    return tuple(sorted(counted, key=itemgetter(1), reverse=True))
