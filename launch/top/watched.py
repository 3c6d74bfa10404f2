"""What `pd-cache top` shows: nodes, rows in an order, and which node is followed. Pure: answers, keys and the time come from the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import msgspec

from launch.figures import NodeHistory, NodeReading, Rates
from launch.figures.rates import merged_sources
from launch.masters import Segment
from launch.top.asker import NodeAnswer, is_asked
from pd_cache.cluster import NodeRecord

NodeState = Literal["asking", "up", "ill", "silent", "-"]
"""`ill`: it answers, and says that something does not work. `-`: it cannot be asked."""
Key = Literal["up", "down", "first", "last", "sort", "reverse", "follow", "back", "help", "quit"]

ORDERS = ("name", "hit", "load", "store", "lookups", "p99", "queue", "evictions")
"""What rows can be sorted by. All but the name begin with the largest."""


class WatchedNode(msgspec.Struct):
    """One node and its history."""

    record: NodeRecord
    history: NodeHistory
    why: str = ""
    """Why it did not answer when it was last asked; empty if it did."""
    answered: float | None = None
    """When it last answered."""


class NodeRow(NamedTuple):
    """One node at one moment."""

    name: str
    role: str
    state: NodeState
    why: str
    """Why it is silent or ill; empty otherwise."""
    silent_s: float | None
    """For how long it has not answered; None if it never did."""
    record: NodeRecord
    reading: NodeReading | None
    rates: Rates | None
    history: NodeHistory
    segments: tuple[Segment, ...]
    """The memory that it gives to the pool, as the master says. For a master, all that it knows."""

    @property
    def p99(self) -> float | None:
        """The 99th percentile of what matters most at this node: its first token or byte, or else its lookups."""
        quantiles = {} if self.rates is None else self.rates.quantiles
        return next((quantiles[name][1] for name in ("first byte", "first token", "lookup") if name in quantiles), None)

    @property
    def evicted(self) -> float:
        """Chunks a second, of all tiers."""
        return 0.0 if self.rates is None else sum(self.rates.evictions.values())


_KEYS: dict[str, Callable[[NodeRow], float | None]] = {
    "hit": lambda row: None if row.rates is None else row.rates.hit,
    "load": lambda row: None if row.rates is None else row.rates.load,
    "store": lambda row: None if row.rates is None else row.rates.store,
    "lookups": lambda row: None if row.rates is None else row.rates.lookups,
    "p99": lambda row: row.p99,
    "queue": lambda row: None if row.reading is None else row.reading.queued,
    "evictions": lambda row: row.evicted,
}


class WatchedCluster:
    """The nodes of the cluster, and what the user looks at."""

    def __init__(self, stale_s: float = 10.0) -> None:
        """`stale_s`: after how many seconds without a new reading a node counts as silent, even if it was not asked since."""
        self.order = "name"
        self.reversed = False
        self.selected = ""
        """The name of the selected node; empty if there is none."""
        self.following = False
        self.helping = False
        self._nodes: dict[str, WatchedNode] = {}
        self._segments: tuple[Segment, ...] = ()
        self._stale_s = stale_s

    def update(self, records: Iterable[NodeRecord]) -> None:
        """Uses these nodes from now on. A node that was started anew keeps its history."""
        listed = list(records)
        self._nodes = {
            record.name: self._nodes.get(record.name) or WatchedNode(record, NodeHistory()) for record in listed
        }
        for record in listed:
            self._nodes[record.name].record = record
        if self.selected not in self._nodes:
            first = min(self._nodes.values(), key=_by_role, default=None)
            self.selected, self.following = "" if first is None else first.record.name, False

    def take(self, answers: Iterable[NodeAnswer]) -> None:
        """Takes in what nodes answered. Ignores nodes that are gone."""
        for answer in answers:
            node = self._nodes.get(answer.name)
            if node is None:
                continue
            node.why = answer.why
            if answer.reading is None:
                node.history.silent()
                continue
            node.answered = answer.at
            node.history.add(answer.reading)
            if answer.segments is not None:
                self._segments = tuple(answer.segments)

    def rows(self, now: float) -> list[NodeRow]:
        """Returns all nodes in the chosen order. Nodes without a value for it come last."""
        rows = [self._row(node, now) for node in sorted(self._nodes.values(), key=_by_role)]
        key = _KEYS.get(self.order)
        if key is None:
            return rows[::-1] if self.reversed else rows
        known = [(value, row) for row in rows if (value := key(row)) is not None]
        known.sort(key=lambda pair: pair[0], reverse=not self.reversed)
        return [row for _, row in known] + [row for row in rows if key(row) is None]

    def sources(self, now: float) -> dict[str, float] | None:
        """Returns where the KV of the last minute's prompts came from, at the nodes that prompts reach first: prefill nodes, or if
        these had no prompts, decode nodes."""
        servers = [node.history for node in self._nodes.values() if node.record.role == "cache-server"]
        for role in ("prefill", "decode"):
            nodes = [node.history for node in self._nodes.values() if node.record.role == role]
            if (found := merged_sources(nodes, servers, now)) is not None:
                return found
        return None

    def press(self, key: Key, now: float) -> bool:
        """Does what a key stands for. Returns False if it ends the program."""
        if key == "quit":
            return False
        names = [row.name for row in self.rows(now)]
        at = names.index(self.selected) if self.selected in names else 0
        match key:
            case "up" | "down" | "first" | "last" if names:
                wanted = {"up": max(0, at - 1), "down": min(len(names) - 1, at + 1), "first": 0, "last": -1}[key]
                self.selected = names[wanted]
            case "sort":
                self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
            case "reverse":
                self.reversed = not self.reversed
            case "follow":
                self.following = bool(names) and not self.following
            case "help":
                self.helping = not self.helping
            case "back":
                self.following = self.helping = False
        return True

    def _row(self, node: WatchedNode, now: float) -> NodeRow:
        record, reading = node.record, node.history.last
        state, why = _state(node, now, self._stale_s)
        alive = state in ("up", "ill")
        return NodeRow(
            record.name,
            record.role,
            state,
            why,
            None if node.answered is None else now - node.answered,
            record,
            reading if alive else None,
            node.history.rates(now) if alive else None,
            node.history,
            self._given(record, reading),
        )

    def _given(self, record: NodeRecord, reading: NodeReading | None) -> tuple[Segment, ...]:
        if record.role == "master":
            return self._segments
        names = (record.address,) if record.role == "store" else () if reading is None else reading.segments
        return tuple(segment for segment in self._segments if segment.segment_name in names)


_ROLES = ("proxy", "prefill", "decode", "cache-server", "store", "master")


def _by_role(node: WatchedNode) -> tuple[int, str]:
    role = node.record.role
    return (_ROLES.index(role) if role in _ROLES else len(_ROLES)), node.record.name


def _state(node: WatchedNode, now: float, stale_s: float) -> tuple[NodeState, str]:
    if not is_asked(node.record):
        return "-", "it has no metrics_port; its memory shows at the master" if node.record.role == "store" else ""
    if node.why:
        return "silent", node.why
    if node.answered is None:
        return "asking", ""
    if now - node.answered > stale_s:
        return "silent", "no answer yet"
    troubles = troubles_of(node.history.last)
    return ("ill", "; ".join(troubles)) if troubles else ("up", "")


def troubles_of(reading: NodeReading | None) -> list[str]:
    """Returns what a node itself says does not work."""
    if reading is None:
        return []
    found = []
    if reading.pool_up is False:
        found.append("calls do not go to the pool: its breaker is open, or its client is not")
    if reading.tiers_off:
        found.append(f"switched off: {', '.join(reading.tiers_off)}")
    if reading.nodes_down:
        found.append(f"leaves {reading.nodes_down} of its nodes alone")
    return found
