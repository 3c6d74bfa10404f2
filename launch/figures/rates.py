"""From a node's readings to rates, shares and quantiles. Pure.

A counter that is lower than before, or whose process was started anew, has begun at zero again: all that it shows now is new.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from launch.figures.readings import SOURCES, NodeReading

LONGEST_WINDOW_S = 60.0
"""The window of shares and quantiles."""
_MOST_STEPS = 120
_SAME_START_S = 1.0
_MOST_TREND = 240
"""How many points of a trend are kept."""
_TIERS = ("memory", "disk", "pool")

K = TypeVar("K")
Key = tuple[str, str]


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has done of late. A second's worth of the last interval, unless stated otherwise; None if that is unknown."""

    load: float = 0.0
    """Bytes that it loaded."""
    store: float = 0.0
    """Bytes that it stored."""
    lookups: float = 0.0
    requests: float = 0.0
    evictions: dict[str, float] = {}
    """Chunks, by tier."""
    sources: dict[str, float] | None = None
    """The parts of the last minute's prompt tokens that came from each of `SOURCES`; None without prompts."""
    quantiles: dict[str, tuple[float, float]] = {}
    """The median and the 99th percentile of the last minute, in seconds, by timing. Infinite beyond the last bucket."""
    missed: tuple[tuple[str, float, float], ...] = ()
    """The reasons of the last minute for tokens that were computed: reason, tokens, and how many seconds ago it last occurred. The most recent
    comes first, then the one with most tokens."""

    @property
    def hit(self) -> float | None:
        """The part of the prompt tokens that were not computed."""
        return None if self.sources is None else 1.0 - self.sources["computed"]


class _Increment(msgspec.Struct, frozen=True):
    """What was counted between two readings."""

    at: float
    seconds: float
    counts: dict[Key, float]
    buckets: dict[str, dict[float, float]]


class NodeHistory:
    """The readings of one node over the last minute, as increments."""

    def __init__(self) -> None:
        self.last: NodeReading | None = None
        self.loads: deque[float] = deque(maxlen=_MOST_TREND)
        """Bytes a second of each interval, the latest last."""
        self.stores: deque[float] = deque(maxlen=_MOST_TREND)
        self.lookups: deque[float] = deque(maxlen=_MOST_TREND)
        self._steps: deque[_Increment] = deque(maxlen=_MOST_STEPS)

    def add(self, reading: NodeReading) -> None:
        """Takes in the next reading. Ignores one that is not later than the last."""
        before, seconds = self.last, 0.0 if self.last is None else reading.at - self.last.at
        if before is not None and seconds <= 0:
            return
        self.last = reading
        if before is None:
            return
        anew = (
            before.started is not None
            and reading.started is not None
            and abs(reading.started - before.started) > _SAME_START_S
        )
        counts = _increase({} if anew else before.counts, reading.counts)
        buckets = {
            name: _increase({} if anew else dict(before.buckets.get(name, ())), dict(found))
            for name, found in reading.buckets.items()
        }
        step = _Increment(reading.at, seconds, counts, buckets)
        self._steps.append(step)
        self.loads.append(_rate(step, "bytes", "retrieve"))
        self.stores.append(_rate(step, "bytes", "store"))
        self.lookups.append(_rate(step, "lookups", ""))

    def silent(self) -> None:
        """Notes that the node did not answer: its trends go on at zero."""
        for trend in (self.loads, self.stores, self.lookups):
            trend.append(0.0)

    def recent(self, now: float) -> list[_Increment]:
        """Returns the increments of the last minute."""
        return [step for step in self._steps if now - step.at <= LONGEST_WINDOW_S]

    def rates(self, now: float) -> Rates | None:
        """Returns what the node has done of late; None before its second reading."""
        if not self._steps:
            return None
        recent = self.recent(now)
        latest = self._steps[-1]
        return Rates(
            load=_rate(latest, "bytes", "retrieve"),
            store=_rate(latest, "bytes", "store"),
            lookups=_rate(latest, "lookups", ""),
            requests=sum(value for (kind, _), value in latest.counts.items() if kind == "requests") / latest.seconds,
            evictions={
                label: value / latest.seconds for (kind, label), value in latest.counts.items() if kind == "evictions"
            },
            sources=_shares(_tokens(recent, self.last)),
            quantiles=_quantiles(recent),
            missed=_missed(recent, now),
        )


def merged_sources(nodes: Iterable[NodeHistory], servers: Iterable[NodeHistory], now: float) -> dict[str, float] | None:
    """Returns the sources of several nodes' prompt tokens together. `servers`: cache servers, which know the tiers of what their engines
    loaded."""
    tokens = dict.fromkeys(SOURCES, 0.0)
    for history in nodes:
        for source, count in _tokens(history.recent(now), history.last).items():
            tokens[source] += count
    parts = _parts([step for history in servers for step in history.recent(now)])
    for tier, part in parts.items():
        tokens[tier] += tokens["loaded"] * part
    if parts:
        tokens["loaded"] = 0.0
    return _shares(tokens)


def _increase(before: Mapping[K, float], after: Mapping[K, float]) -> dict[K, float]:
    known = {key: before.get(key, 0.0) for key in after}
    return {key: value - known[key] if value >= known[key] else value for key, value in after.items()}


def _rate(step: _Increment, kind: str, label: str) -> float:
    return step.counts.get((kind, label), 0.0) / step.seconds


def _sums(steps: list[_Increment], kind: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for step in steps:
        for (of, label), value in step.counts.items():
            if of == kind:
                found[label] = found.get(label, 0.0) + value
    return found


def _tokens(steps: list[_Increment], last: NodeReading | None) -> dict[str, float]:
    """Returns how many tokens came from each source. Loaded ones are split as the chunks that were read from each tier."""
    tokens = _sums(steps, "tokens")
    found = {source: tokens.get(source, 0.0) for source in ("engine", "loaded", "computed")}
    parts = _parts(steps)
    if not parts and last is not None and len(last.tier_bytes) == 1:
        parts = dict.fromkeys(last.tier_bytes, 1.0)  # a node with one tier does not count by tier
    if parts and set(parts) <= set(_TIERS):
        loaded = found.pop("loaded")
        found |= {tier: loaded * part for tier, part in parts.items()}
    return found


def _parts(steps: list[_Increment]) -> dict[str, float]:
    """Returns which part of the chunks was read from each tier; empty if none was."""
    hits = _sums(steps, "hits")
    read = sum(hits.get(tier, 0.0) for tier in _TIERS)
    return {tier: hits.get(tier, 0.0) / read for tier in _TIERS} if read else {}


def _shares(tokens: Mapping[str, float]) -> dict[str, float] | None:
    asked = sum(tokens.values())
    return {source: tokens.get(source, 0.0) / asked for source in SOURCES} if asked else None


def _quantiles(steps: list[_Increment]) -> dict[str, tuple[float, float]]:
    names = {name for step in steps for name in step.buckets}
    found = {}
    for name in sorted(names):
        counted: dict[float, float] = {}
        for step in steps:
            for bound, value in step.buckets.get(name, {}).items():
                counted[bound] = counted.get(bound, 0.0) + value
        pair = quantile(counted, 0.5), quantile(counted, 0.99)
        if not math.isnan(pair[0]):
            found[name] = pair
    return found


def quantile(counted: dict[float, float], part: float) -> float:
    """Returns the value below which `part` of the observations lie, as Prometheus' `histogram_quantile` does: by a straight line through its
    bucket. `counted`: how many were at most so large. Infinite in the bucket without a bound, NaN without observations."""
    bounds = sorted(counted)
    if not bounds or counted[bounds[-1]] <= 0:
        return math.nan
    wanted = part * counted[bounds[-1]]
    below, start = 0.0, 0.0
    for bound in bounds:
        upto = max(below, counted[bound])  # a node can send buckets that do not rise
        if upto >= wanted and upto > below:
            return bound if math.isinf(bound) else start + (bound - start) * (wanted - below) / (upto - below)
        below, start = upto, bound
    return bounds[-1]


def _missed(steps: list[_Increment], now: float) -> tuple[tuple[str, float, float], ...]:
    tokens: dict[str, float] = {}
    seen: dict[str, float] = {}
    for step in steps:
        for (kind, reason), value in step.counts.items():
            if kind == "missed" and reason != "none" and value > 0:
                tokens[reason] = tokens.get(reason, 0.0) + value
                seen[reason] = step.at
    reasons = sorted(tokens, key=lambda reason: (-seen[reason], -tokens[reason]))
    return tuple((reason, tokens[reason], max(0.0, now - seen[reason])) for reason in reasons)
