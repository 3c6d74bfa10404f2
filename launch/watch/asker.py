"""Asks the nodes of a cluster for their state, for `status`, `top`, `doctor` and `/ui`. `state.py` interprets
the answers.

`cluster_status` asks each node once. `Asker` asks again and again, each node on a schedule of its own, so
that a slow node delays no other.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import urllib.parse
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from launch.discovery import known_master, open_directory
from launch.http import NOBODY, Access, BadStatus, fetch, proxy_access
from launch.masters import LEADER, MasterHealth, segments_at
from launch.watch.figures import read_node, read_samples
from launch.watch.state import ClusterStatus, NodeStatus, RoleShown, WatchedNodes, page_of, shown_version
from pd_cache.cluster import About, ClusterConfig, NodeRecord
from pd_cache.decoding import UndecodableError, decode_json, one_line
from pd_cache.errors import PdCacheError
from pd_cache.versions import FIRST

TIMEOUT_S = 2.0
"""How long a node may take for an answer."""
SYNC_S = 5.0
"""How long discovery may take."""
_CHOSEN_BY_UP = "its port is 0 in this file: `up` chooses it, but this user runs no `up`"
_AT_A_TIME = 64
_OUT_S = 60.0
"""`status` reports only engines that have been out for longer than this, because a reset has to wait for the
last engine's change."""
_OUT = (
    "the weights have changed and have no label, so it loads and stores nothing; run `pd-cache reset` when all nodes "
    "have the new weights"
)
_reading = threading.Lock()
"""Held while an answer is parsed: parsing many answers at once would delay a proxy's event loop."""


# --- one node -----------------------------------------------------------------------------------------------


class _Unwell(msgspec.Struct, frozen=True):
    """The body of a `/health` that is answered with 503."""

    status: str = ""
    reason: str = ""
    """The reason, if the node gives one."""


class _Told(msgspec.Struct, frozen=True):
    """The part of a proxy's `/health` that no other node has."""

    roles: dict[str, RoleShown] = {}


def ask_node(record: NodeRecord, access: Access) -> NodeStatus:
    """Asks a node for its `/health`, and then for its metrics. `access`: key and certificates for proxies.
    Raises nothing."""
    url, proxy = page_of(record), record.role == "proxy"
    found, troubles = NodeStatus(record=record), list[str]()
    access = access if proxy else NOBODY
    try:
        body = _text(f"{url}/health", access)
        if record.role == "master":
            health = decode_json(body, MasterHealth)
            waits = health.role == LEADER and not health.service_ready
            found.leads = "leads, but does not serve yet" if waits else health.role
        try:
            about = decode_json(body, About) if body.startswith("{") else About()  # a plain vLLM says nothing
            found.record = record.telling(about)
        except UndecodableError as error:
            troubles.append(f"/health: {error}")
        if proxy:
            found.roles = decode_json(body, _Told).roles
    except BadStatus as error:
        if error.status >= 500:
            said = _Unwell()
            with contextlib.suppress(ValueError):
                said = decode_json(error.body, _Unwell)
            troubles.append(
                f"/health answers {error.status}: {one_line(said.reason or said.status)}".removesuffix(": ")
            )
    except (OSError, ValueError) as error:
        what = "/health: " if isinstance(error, UndecodableError) else ""  # it may be another program's
        why = what + (one_line(str(error)) or repr(error))
        return NodeStatus(record=record, at=time.monotonic(), state="down", why=why)
    found.at = time.monotonic()
    # otherwise this machine has no readable key for its metrics
    if not proxy or access.key or not access.guarded:
        try:
            text = _text(f"{url}/metrics", access)
            found.at = time.monotonic()
            if record.role == "master":
                with contextlib.suppress(OSError, ValueError):
                    found.segments = tuple(segments_at(url))
            with _reading:
                found.reading = read_node(read_samples(text), found.at)
            troubles += found.reading.troubles
        except (OSError, ValueError) as error:
            troubles.append(f"its metrics: {one_line(str(error)) or repr(error)}")
    if troubles:
        found.state, found.why = "degraded", "; ".join(troubles)
    return found


def _text(url: str, access: Access = NOBODY) -> str:
    """Returns a node's answer. Raises OSError if there is none, ValueError if only `up` knows its port."""
    if urllib.parse.urlsplit(url).port == 0:
        raise ValueError(_CHOSEN_BY_UP)
    return fetch(url, TIMEOUT_S, access).decode(errors="replace")


# --- all nodes, once ----------------------------------------------------------------------------------------


def cluster_status(config: ClusterConfig, times: int = 1, interval_s: float = 0.0) -> ClusterStatus:
    """Asks discovery, then every node, all at the same time; each has a few seconds to answer. Shares and
    quantiles are since the nodes' start.

    `times`: how often to ask each; two answers, `interval_s` apart, give rates.
    """
    access = proxy_access(config)
    watched = watched_nodes(config, stale_s=math.inf, since_start=True)
    with open_directory(config) as directory, ThreadPoolExecutor(_AT_A_TIME, "pd-cache-ask") as threads:
        synced = directory.wait_synced(SYNC_S)
        watched.update(directory.view(), synced)
        for number in range(times):
            time.sleep(interval_s if number else 0.0)
            watched.take(threads.map(lambda record: ask_node(record, access), watched.asked))
    found = watched.status(time.monotonic())
    return msgspec.structs.replace(found, weights=_weights(found.nodes))


def watched_nodes(config: ClusterConfig, *, stale_s: float, since_start: bool = False) -> WatchedNodes:
    """Returns the nodes of a file's cluster, before any node has answered."""
    kind = str(config.discovery.__struct_config__.tag)
    return WatchedNodes(kind, elected=config.masters.ha, stale_s=stale_s, since_start=since_start)


def _weights(nodes: Iterable[NodeStatus]) -> list[str]:
    found: dict[str, list[str]] = {}
    for node in nodes:
        for state in node.record.weights:
            if state.label is not None:
                found.setdefault(shown_version(state.label), []).append(node.name)
            elif time.time() - state.since >= _OUT_S:
                found.setdefault(_OUT, []).append(node.name)
    if found.keys() <= {shown_version(FIRST)}:
        return []
    return [f"{', '.join(dict.fromkeys(names))}: {what}" for what, names in sorted(found.items())]


def leading_master(config: ClusterConfig, status: ClusterStatus) -> str:
    """Returns the address of the pool's master for Mooncake's clients, from the file, or else from etcd."""
    return known_master(config) or status.leading[0].record.address


def leading_metrics(status: ClusterStatus) -> str:
    """Returns the URL at which the leading master answers. Raises PdCacheError if none does."""
    for row in status.leading:
        if row.record.metrics is not None:
            return row.record.metrics
    raise no_leader(status)


def no_leader(status: ClusterStatus) -> PdCacheError:
    """Returns the error of commands that need the leading master, with what each master said."""
    said = "; ".join(": ".join(filter(None, (node.name, node.state, node.why))) for node in status.masters)
    return PdCacheError(
        f"no master that leads has answered ({said or 'none is known'}): see `pd-cache status`"
    )


# --- again and again ----------------------------------------------------------------------------------------


class _Schedule(msgspec.Struct):
    """When to ask one node."""

    due: float = 0.0
    question: Future[NodeStatus] | None = None
    """The question under way; None if there is none."""


class Asker:
    """Asks nodes on a bounded set of threads."""

    def __init__(self, access: Access, interval_s: float) -> None:
        """`interval_s`: from one question to a node to the next."""
        self._access = access
        self._interval_s = interval_s
        self._schedules: dict[str, _Schedule] = {}
        self._threads = ThreadPoolExecutor(_AT_A_TIME, "pd-cache-watch")

    def poll(self, records: Iterable[NodeRecord], now: float) -> list[NodeStatus]:
        """Asks every node that is due, and returns the answers that have arrived. Does not wait."""
        wanted = {record.name: record for record in records}
        self._schedules = {name: self._schedules.get(name) or _Schedule() for name in wanted}
        answers = []
        for name, record in wanted.items():
            schedule = self._schedules[name]
            if schedule.question is not None and schedule.question.done():
                answers.append(schedule.question.result())
                schedule.question = None
            if schedule.question is None and schedule.due <= now:
                schedule.due = now + self._interval_s
                schedule.question = self._threads.submit(ask_node, record, self._access)
        return answers

    def close(self) -> None:
        """Asks no more. Waits for the questions under way, for at most their deadline."""
        self._threads.shutdown(wait=True, cancel_futures=True)
