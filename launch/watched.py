"""The nodes of a cluster, asked for their metrics again and again; for `top` and `/ui` alike.

`Asker` asks each node on a schedule of its own, so that a slow node delays no other. `WatchedNodes` (pure) keeps what they answered, and says
how each one is.
"""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

import msgspec

from launch.figures import NodeHistory, NodeReading, Rates, merged_sources, read_node, read_samples
from launch.http import NOBODY, Access, fetch
from launch.masters import Segment, read_segments
from pd_cache.cluster import NodeRecord
from pd_cache.decoding import one_line

TIMEOUT_S = 2.0
"""How long a node may take."""
_CHOSEN_BY_UP = "its port is 0 in this file: `up` chooses it, and this user has none running"
_AT_A_TIME = 64
_ROLES = ("proxy", "prefill", "decode", "cache-server", "store", "master")
_reading = threading.Lock()
"""Held while an answer is read: many at once would take the interpreter from a proxy's event loop."""

NodeState = Literal["asking", "up", "ill", "silent", "-"]
"""`ill`: it answers, and says that something does not work. `-`: it cannot be asked."""


class NodeAnswer(NamedTuple):
    """What came of asking one node."""

    name: str
    at: float
    """When, by `time.monotonic()`."""
    reading: NodeReading | None = None
    why: str = ""
    """Why there is no reading."""
    segments: list[Segment] | None = None
    """For a master: the segments that it knows."""


def page_of(record: NodeRecord) -> str:
    """Returns the address at which a node answers `/health` and `/metrics`; empty if it takes no questions."""
    return record.address if record.address.startswith(("http://", "https://")) else record.metrics or ""


def why_not_asked(record: NodeRecord) -> str:
    """Returns why `page_of` is empty."""
    return "it has no metrics_port" + ("; its memory shows at the master" if record.role == "store" else "")


def ask_node(record: NodeRecord, access: Access) -> NodeAnswer:
    """Asks a node for its metrics. `access`: key and certificates for proxies. Raises nothing."""
    segments: list[Segment] | None = None
    try:
        text = get_text(f"{page_of(record)}/metrics", access if record.role == "proxy" else NOBODY)
        at = time.monotonic()
        if record.role == "master":
            with contextlib.suppress(OSError, ValueError):
                segments = read_segments(get_text(f"{record.metrics}/get_segments_detail").encode())
        with _reading:
            return NodeAnswer(record.name, at, read_node(read_samples(text), at), segments=segments)
    except (OSError, ValueError) as error:
        return NodeAnswer(record.name, time.monotonic(), None, one_line(str(error)) or repr(error))


def get_text(url: str, access: Access = NOBODY) -> str:
    """Returns what a node answers. Raises OSError if it does not, ValueError if only `up` knows its port."""
    if urllib.parse.urlsplit(url).port == 0:
        raise ValueError(_CHOSEN_BY_UP)
    return fetch(url, TIMEOUT_S, access).decode(errors="replace")


class _Schedule(msgspec.Struct):
    """When to ask one node."""

    due: float = 0.0
    question: Future[NodeAnswer] | None = None
    """Under way."""


class Asker:
    """Asks nodes on a bounded set of threads."""

    def __init__(self, access: Access, interval_s: float) -> None:
        """`interval_s`: from one question to a node to the next."""
        self._access = access
        self._interval_s = interval_s
        self._schedules: dict[str, _Schedule] = {}
        self._threads = ThreadPoolExecutor(_AT_A_TIME, "pd-cache-watch")

    def poll(self, records: Iterable[NodeRecord], now: float) -> list[NodeAnswer]:
        """Asks every node that is due, and returns the answers that have arrived. Does not wait."""
        wanted = {record.name: record for record in records}
        self._schedules = {name: self._schedules.get(name) or _Schedule() for name in wanted}
        answers = []
        for name, record in wanted.items():
            schedule = self._schedules[name]
            if schedule.question is not None and schedule.question.done():
                error = schedule.question.exception()
                answer = NodeAnswer(name, now, None, one_line(repr(error))) if error else schedule.question.result()
                schedule.question = None
                answers.append(answer)
                # from when it was due, so that intervals do not drift, unless it was late
                schedule.due = max(schedule.due + self._interval_s, now)
            if schedule.question is None and schedule.due <= now:
                schedule.due = now
                schedule.question = self._threads.submit(ask_node, record, self._access)
        return answers

    def close(self) -> None:
        """Asks no more. Waits for the questions under way, for at most their deadline."""
        self._threads.shutdown(wait=True, cancel_futures=True)


class _Watched(msgspec.Struct):
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
    reading: NodeReading
    """Without figures while it does not answer."""
    rates: Rates | None
    history: NodeHistory
    segments: tuple[Segment, ...]
    """The memory that it gives to the pool, as the master says. For a master, all that it knows."""

    @property
    def hit(self) -> float | None:
        return None if self.rates is None else self.rates.hit

    @property
    def p99(self) -> float | None:
        """The 99th percentile of what matters most at this node: its first token or byte, or else its lookups."""
        quantiles = {} if self.rates is None else self.rates.quantiles
        return next((quantiles[name][1] for name in ("first byte", "first token", "lookup") if name in quantiles), None)

    @property
    def evicted(self) -> float:
        """Chunks a second, of all tiers."""
        return 0.0 if self.rates is None else sum(self.rates.evictions.values())


class WatchedNodes:
    """What is known of the nodes. The time comes from the caller."""

    def __init__(
        self, stale_s: float = 10.0, since_start: bool = False, asked: Callable[[NodeRecord], object] = page_of
    ) -> None:
        """`stale_s`: after how many seconds without a new reading a node counts as silent, even if it was not asked since. `since_start`: shares
        and quantiles are those since the nodes' start, and not of the last minute. `asked`: which nodes are asked."""
        self.segments: tuple[Segment, ...] = ()
        """The pool's memory, as the master said last."""
        self._nodes: dict[str, _Watched] = {}
        self._stale_s = stale_s
        self._since_start = since_start
        self._asked = asked

    @property
    def asked(self) -> list[NodeRecord]:
        """The nodes to ask."""
        return [node.record for node in self._nodes.values() if self._asked(node.record)]

    def update(self, records: Iterable[NodeRecord]) -> None:
        """Uses these nodes from now on. A node that was started anew keeps its history."""
        nodes = {}
        for record in records:
            node = self._nodes.get(record.name) or _Watched(record, NodeHistory(self._since_start))
            node.record = record
            nodes[record.name] = node
        self._nodes = nodes

    def take(self, answers: Iterable[NodeAnswer]) -> None:
        """Takes in what nodes answered. Ignores nodes that are gone."""
        for answer in answers:
            node = self._nodes.get(answer.name)
            if node is None:
                continue
            node.why = answer.why
            if answer.reading is None:
                node.history.silent(answer.at)
                continue
            node.answered = answer.at
            node.history.add(answer.reading)
            if answer.segments is not None:
                self.segments = tuple(answer.segments)

    def rows(self, now: float) -> list[NodeRow]:
        """Returns all nodes, in the order of a request's way."""
        rows = [self._row(node, now) for node in self._nodes.values()]
        return sorted(rows, key=lambda row: (_ROLES.index(row.role) if row.role in _ROLES else len(_ROLES), row.name))

    def sources(self, now: float) -> dict[str, float] | None:
        """Returns where the KV of the last minute's prompts came from, at the nodes that prompts reach first: prefill nodes, or if
        these had no prompts, decode nodes."""
        servers = [node.history for node in self._nodes.values() if node.record.role == "cache-server"]
        for role in ("prefill", "decode"):
            nodes = [node.history for node in self._nodes.values() if node.record.role == role]
            if (found := merged_sources(nodes, servers, now)) is not None:
                return found
        return None

    def _row(self, node: _Watched, now: float) -> NodeRow:
        record, reading = node.record, node.history.last
        state, why = self._state(node, now)
        alive = state in ("up", "ill")
        if record.role == "master":
            segments = self.segments
        else:
            names = (record.address,) if record.role == "store" else () if reading is None else reading.segments
            segments = tuple(segment for segment in self.segments if segment.segment_name in names)
        return NodeRow(
            record.name,
            record.role,
            state,
            why,
            None if node.answered is None else now - node.answered,
            record,
            reading if alive and reading is not None else NodeReading(at=now),
            node.history.rates(now) if alive else None,
            node.history,
            segments,
        )

    def _state(self, node: _Watched, now: float) -> tuple[NodeState, str]:
        if not self._asked(node.record):
            return "-", "" if page_of(node.record) else why_not_asked(node.record)
        if node.why:
            return "silent", node.why
        if node.answered is None:
            return "asking", ""
        if now - node.answered > self._stale_s:
            return "silent", "no answer yet"
        reading, troubles = node.history.last or NodeReading(at=now), []
        if reading.pool_up is False:
            troubles.append("calls do not go to the pool: its breaker is open, or its client is not")
        if reading.tiers_off:
            troubles.append(f"switched off: {', '.join(reading.tiers_off)}")
        if reading.nodes_down:
            troubles.append(f"leaves {reading.nodes_down} of its nodes alone")
        return ("ill", "; ".join(troubles)) if troubles else ("up", "")
