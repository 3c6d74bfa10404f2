"""What a node's metrics say at one moment, in terms of the cache instead of names of metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from launch.figures.samples import Samples, total
from pd_cache.decoding import one_line

SOURCES = ("engine", "memory", "disk", "pool", "loaded", "computed")
"""Where the KV of a prompt's tokens came from: the engine's own cache, one of the tiers, a tier that the node does not name, or nowhere."""
TIMINGS = ("lookup", "retrieve", "store", "first token", "first byte")

_TIERS = {"local": "memory", "disk": "disk", "mooncake": "pool"}
_MOST_LABELS = 32
"""The most reasons, or tiers, of one node. A node can send any text as a label."""
_LONGEST_LABEL = 40
_MOST_BUCKETS = 64
_FIRST_TOKEN = ("pd_cache_reference_ttft_seconds_bucket", "time_to_first_token_seconds_bucket")
_QUEUED = ("pd_cache_reference_queue_length", "num_requests_waiting")
_RUNNING = ("pd_cache_reference_running", "num_requests_running", "pd_cache_proxy_requests_running")


class NodeReading(msgspec.Struct, frozen=True, kw_only=True):
    """A node's metrics at one moment. Gauges are None if the node does not export them."""

    at: float
    """When they were read, by a monotonic clock."""
    started: float | None = None
    """When the process started, in seconds since 1970. Counters of another start have begun at zero again."""
    counts: dict[tuple[str, str], float] = {}
    """What only grows, by kind and label: `lookups`, `requests` (by status), `bytes` (by operation), `tokens` (by source), `hits` and
    `evictions` (by tier), `missed` (tokens by reason)."""
    buckets: dict[str, tuple[tuple[float, float], ...]] = {}
    """For each of `TIMINGS` that the node exports, how many took up to so many seconds; in rising order."""
    queued: float | None = None
    running: float | None = None
    staging: float | None = None
    staging_used: float | None = None
    pool_up: bool | None = None
    tiers_off: tuple[str, ...] = ()
    nodes_down: int = 0
    """For a proxy: how many nodes it leaves alone."""
    tier_bytes: dict[str, float] = {}
    segments: tuple[str, ...] = ()
    """The names of the segments that it gives to the pool."""


def read_node(samples: Samples, at: float) -> NodeReading:
    """Returns what the samples of one node say."""
    started = samples.get("process_start_time_seconds")
    up = samples.get("pd_cache_pool_up")
    return NodeReading(
        at=at,
        started=started[0][1] if started else None,
        counts=_counts(samples),
        buckets={name: found for name in TIMINGS if (found := _buckets(_histogram(samples, name)))},
        queued=_gauge(samples, _QUEUED),
        running=_gauge(samples, _RUNNING),
        staging=_gauge(samples, ("pd_cache_staging_bytes",)),
        staging_used=_gauge(samples, ("pd_cache_staging_used_bytes",)),
        pool_up=all(value > 0 for _, value in up) if up else None,
        tiers_off=tuple(tier for tier, off in _by(samples, "pd_cache_tier_off", "tier", _tier) if off),
        nodes_down=sum(value == 0 for _, value in samples.get("pd_cache_proxy_node_up", ())),
        tier_bytes=_kept(_by(samples, "pd_cache_tier_bytes", "tier", _tier)),
        segments=tuple(_kept(_by(samples, "pd_cache_segment_bytes", "segment"))),
    )


def _counts(samples: Samples) -> dict[tuple[str, str], float]:
    operations = {
        **_kept(_by(samples, "pd_cache_ops_total", "op")),
        **_kept(_by(samples, "pd_cache_op_seconds_count", "op")),
    }
    tokens = _kept(_by(samples, "pd_cache_prompt_tokens_total", "source"))
    hits = _kept(_by(samples, "pd_cache_tier_hits_total", "tier", _tier))
    evictions = _kept(_by(samples, "pd_cache_tier_evictions_total", "tier", _tier))
    if "master_evicted_key_count" in samples:
        evictions["pool"] = total(samples, "master_evicted_key_count")
    families: tuple[tuple[str, dict[str, float]], ...] = (
        ("lookups", {"": operations.get("lookup", 0.0)}),
        ("requests", _kept(_by(samples, "pd_cache_proxy_requests_total", "status"))),
        ("bytes", _kept(_by(samples, "pd_cache_bytes_total", "op"))),
        ("tokens", {"engine" if source == "at_hand" else source: value for source, value in tokens.items()}),
        ("hits", hits),
        ("evictions", evictions),
        ("missed", _kept(_by(samples, "pd_cache_missed_tokens_total", "reason"))),
    )
    return {(kind, label): value for kind, found in families for label, value in found.items()}


def _by(samples: Samples, name: str, label: str, called: dict[str, str] | None = None) -> Iterable[tuple[str, float]]:
    for labels, value in samples.get(name, ()):
        if label in labels:
            text = one_line(labels[label][:_LONGEST_LABEL])
            # a second tier of a kind is called `disk-1`
            yield text if called is None else called.get(text.partition("-")[0], text), value


_tier = _TIERS


def _kept(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Adds up what has one label. Labels beyond the most that are kept count as `others`."""
    found: dict[str, float] = {}
    for label, value in pairs:
        key = label if label in found or len(found) < _MOST_LABELS else "others"
        found[key] = found.get(key, 0.0) + value
    return found


def _gauge(samples: Samples, names: tuple[str, ...]) -> float | None:
    present = [name for name in names if name in samples]
    return sum(total(samples, name) for name in present) if present else None


def _histogram(samples: Samples, timing: str) -> list[tuple[dict[str, str], float]]:
    if timing == "first token":
        return [sample for name in _FIRST_TOKEN for sample in samples.get(name, ())]
    if timing == "first byte":
        return samples.get("pd_cache_proxy_first_byte_seconds_bucket", [])
    return [one for one in samples.get("pd_cache_op_seconds_bucket", ()) if one[0].get("op") == timing]


def _buckets(samples: list[tuple[dict[str, str], float]]) -> tuple[tuple[float, float], ...]:
    found: dict[float, float] = {}
    for labels, value in samples:
        try:
            bound = float(labels.get("le", ""))
        except ValueError:
            continue
        if not math.isnan(bound) and (bound in found or len(found) < _MOST_BUCKETS):
            found[bound] = found.get(bound, 0.0) + value
    return tuple(sorted(found.items()))
