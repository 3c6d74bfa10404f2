"""Asks nodes for their metrics, each on a schedule of its own, so that a slow node delays no other."""

from __future__ import annotations

import contextlib
import queue
import time
import urllib.parse
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from launch.access import NOBODY, Access
from launch.asking import fetch
from launch.figures import NodeReading, read_node, read_samples
from launch.masters import Segment, read_segments
from pd_cache.cluster import NodeRecord
from pd_cache.decoding import one_line
from pd_cache.errors import PdCacheError

TIMEOUT_S = 2.0
"""How long a node may take."""
_LARGEST = 4 << 20
_AT_A_TIME = 16
_SILENT_AT_A_TIME = 8
_LONGEST_PAUSE_S = 15.0


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


def is_asked(record: NodeRecord) -> bool:
    """Returns whether there is a way to ask this node."""
    if record.role in ("master", "store"):
        return record.metrics is not None
    return record.role == "cache-server" or record.address.startswith("http")


def ask_node(record: NodeRecord, access: Access, clock: Callable[[], float] = time.monotonic) -> NodeAnswer:
    """Asks a node for its metrics. `access`: key and certificates for proxies. Raises nothing."""
    try:
        if record.role == "master":
            assert record.metrics is not None
            text = _get(record.metrics + "/metrics")
            segments = None
            with contextlib.suppress(OSError, ValueError):
                segments = read_segments(_get(record.metrics + "/get_segments_detail").encode())
            return NodeAnswer(record.name, at := clock(), read_node(read_samples(text), at), segments=segments)
        if record.role == "cache-server":
            text = _server_metrics(record)
        elif record.role == "store":
            assert record.metrics is not None
            text = _get(record.metrics + "/metrics")
        else:
            text = _get(record.address + "/metrics", access if record.role == "proxy" else NOBODY)
        return NodeAnswer(record.name, at := clock(), read_node(read_samples(text), at))
    except (OSError, PdCacheError, ValueError) as error:
        said = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        return NodeAnswer(record.name, clock(), None, one_line(str(said)) or repr(error))


def _server_metrics(record: NodeRecord) -> str:
    if record.metrics is not None and urllib.parse.urlsplit(record.metrics).port:
        return _get(record.metrics + "/metrics")

    from pd_cache.client.observer import server_status

    return server_status(record.address, TIMEOUT_S).metrics


def _get(url: str, access: Access = NOBODY) -> str:
    if urllib.parse.urlsplit(url).port == 0:
        raise ValueError("its port is 0 in this file, chosen by `up`")
    return fetch(url, TIMEOUT_S, access, most=_LARGEST).decode(errors="replace")


class _Schedule(msgspec.Struct):
    """When to ask one node."""

    due: float = 0.0
    busy: bool = False
    failures: int = 0


class Asker:
    """Asks nodes on two bounded sets of threads: those that answered last time on one, the silent ones, less and less often, on the other."""

    def __init__(self, access: Access, interval_s: float) -> None:
        """`interval_s`: from one question to a node to the next."""
        self._access = access
        self._interval_s = interval_s
        self._answers: queue.SimpleQueue[NodeAnswer] = queue.SimpleQueue()
        self._schedules: dict[str, _Schedule] = {}
        self._well = ThreadPoolExecutor(_AT_A_TIME, "pd-cache-top")
        self._silent = ThreadPoolExecutor(_SILENT_AT_A_TIME, "pd-cache-top-silent")

    def poll(self, records: Iterable[NodeRecord], now: float) -> list[NodeAnswer]:
        """Asks every node that is due, and returns the answers that have arrived. Does not wait."""
        wanted = {record.name: record for record in records if is_asked(record)}
        self._schedules = {name: self._schedules.get(name) or _Schedule() for name in wanted}
        answers = []
        with contextlib.suppress(queue.Empty):
            while True:
                answers.append(self._answers.get_nowait())
        for answer in answers:
            if (schedule := self._schedules.get(answer.name)) is not None:
                schedule.busy = False
                schedule.failures = 0 if answer.reading is not None else schedule.failures + 1
                pause = min(_LONGEST_PAUSE_S, self._interval_s * 2 ** min(schedule.failures, 8))
                # from when it was due, so that intervals do not drift, unless it was late
                schedule.due = max(schedule.due + self._interval_s, now) if not schedule.failures else now + pause
        for name, record in wanted.items():
            schedule = self._schedules[name]
            if not schedule.busy and schedule.due <= now:
                schedule.busy, schedule.due = True, now
                threads = self._silent if schedule.failures else self._well
                threads.submit(self._ask, record)
        return answers

    def _ask(self, record: NodeRecord) -> None:
        try:
            answer = ask_node(record, self._access)
        except BaseException as error:
            self._answers.put(NodeAnswer(record.name, time.monotonic(), None, one_line(repr(error))))
            raise
        self._answers.put(answer)

    def close(self) -> None:
        """Waits for the questions under way, for at most their deadline."""
        for threads in (self._well, self._silent):
            threads.shutdown(wait=False, cancel_futures=True)
        for threads in (self._well, self._silent):
            threads.shutdown(wait=True)
