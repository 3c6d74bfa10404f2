"""Asks discovery, then every node, what is there and how it is."""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.parse
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
from rich.console import Console
from rich.live import Live

from launch.access import NOBODY, Access, proxy_access
from launch.asking import fetch
from launch.discovery import Directory, View, open_directory
from launch.figures import Samples, read_samples, total
from launch.masters import LEADER, Segment, master_health, segments_at
from launch.status.node_status import NO_ANSWER, NOT_ASKED, ClusterStatus, NodeStatus
from launch.status.table import status_table
from pd_cache.cluster import ClusterConfig, NodeRecord, differences, read_about
from pd_cache.cluster.addresses import is_local
from pd_cache.errors import PdCacheError

_SYNC_S = 5.0
_TIMEOUT_S = 2.0
_AT_A_TIME = 16
_IN_FLIGHT = (
    "pd_cache_reference_queue_length",
    "pd_cache_reference_running",
    "pd_cache_proxy_requests_running",
    "num_requests_running",
    "num_requests_waiting",
)


def cluster_status(config: ClusterConfig) -> ClusterStatus:
    """Asks discovery, then every node, all at the same time; each has a few seconds to answer."""
    with open_directory(config) as directory:
        directory.wait_synced(_SYNC_S)
        return _look(config, directory)


def watch(config: ClusterConfig, interval: float = 2.0) -> None:
    """Shows the table, again and again, until Ctrl-C. Discovery is followed meanwhile: an outage shows as one."""
    try:
        with open_directory(config) as directory, Live(console=Console(), auto_refresh=False) as live:
            directory.wait_synced(_SYNC_S)
            while True:
                live.update(status_table(_look(config, directory)), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _look(config: ClusterConfig, directory: Directory) -> ClusterStatus:
    synced, view = directory.wait_synced(0), directory.view()
    access = proxy_access(config)
    with ThreadPoolExecutor(_AT_A_TIME, "pd-cache-status") as threads:
        rows = list(threads.map(lambda record: _ask(record, access), view.nodes))
    differing = differences(row.record for row in rows)
    for row in rows:
        row.difference = differing.get(row.name, "")
        if row.name in view.doubted:
            row.state += "; not registered again since discovery was away"
    fresh = synced and view.stale_since is None
    found = ClusterStatus(_source(config, view, synced), fresh, rows, dict(view.unreadable))
    return msgspec.structs.replace(found, segments=_segments(found.leading))


def _segments(leading: Iterable[NodeStatus]) -> list[Segment] | None:
    """Returns the first leading master's segments, and notes in each one's row how much memory it knows of."""
    known: list[list[Segment]] = []
    for row in leading:
        with contextlib.suppress(OSError, ValueError):
            assert row.record.metrics is not None, "a master without metrics has not said that it leads"
            known.append(segments_at(row.record.metrics))
            row.mounted = sum(segment.size_bytes for segment in known[-1])
    return known[0] if known else None


def _source(config: ClusterConfig, view: View, synced: bool) -> str:
    kind = str(config.discovery.__struct_config__.tag)
    if not synced:
        return f"{kind}, which does not answer: these are the nodes of the file"
    if view.stale_since is not None:
        silent = time.monotonic() - view.stale_since
        return f"{kind}, which has not answered for {silent:.0f} s: these are the nodes that were there before"
    return kind


def _ask(record: NodeRecord, access: Access) -> NodeStatus:
    """`access`: key and certificates for proxies."""
    row = NodeStatus(record=record)
    try:
        if record.role == "store" and record.metrics is not None:
            _ask_store(record.metrics, row)
        elif record.role == "store":
            row.state = f"{NOT_ASKED}: it has no metrics_port; its memory shows in the master's row"
        elif record.role == "master":
            _ask_master(row)
        elif record.role == "cache-server":
            _ask_server(row)
        elif record.address.startswith("http"):
            _ask_http(record.address, row, access if record.role == "proxy" else NOBODY)
        else:
            row.state = NOT_ASKED
    except OSError as error:
        row.state = f"{NO_ANSWER}: {getattr(error, 'reason', error)}"
    except (PdCacheError, ValueError) as error:
        row.state = f"{NO_ANSWER}: {error}"
    return row


def _ask_server(row: NodeStatus) -> None:
    address, metrics = row.record.address, row.record.metrics
    if (
        metrics is not None
        and address.startswith("ipc://")
        and not is_local(urllib.parse.urlsplit(metrics).hostname or "")
    ):
        _read_cache(read_samples(_get(metrics, "/metrics")), row)
        return
    if address.endswith(":0"):
        raise ValueError("its address depends on a port that is 0 in this file, chosen by `up`")

    from pd_cache.client.observer import server_status

    report = server_status(address, _TIMEOUT_S)
    _read_cache(read_samples(report.metrics), row)
    row.up_since, row.in_flight = report.up_since, report.in_flight
    row.record = msgspec.structs.replace(row.record, version=report.software)


def _ask_master(row: NodeStatus) -> None:
    if row.record.metrics is None:
        row.state = f"{NOT_ASKED}: it does not tell where its metrics are"
        return
    health = master_health(_known(row.record.metrics), _TIMEOUT_S)
    row.leads = "leads, but does not serve yet" if health.role == LEADER and not health.service_ready else health.role
    samples = read_samples(_get(row.record.metrics, "/metrics"))
    row.bytes_by_tier = {"mooncake": total(samples, "master_allocated_bytes")}
    refused = total(samples, "master_put_start_alloc_failures_total")
    row.errors = {"store.no_space": refused} if refused else {}


def _ask_store(metrics: str, row: NodeStatus) -> None:
    with _refusals(row, "/health", worst=500):
        _read_store(_get(metrics, "/health"), read_samples(_get(metrics, "/metrics")), row)


def _read_store(health: str, samples: Samples, row: NodeStatus) -> None:
    row.record = msgspec.structs.replace(row.record, version=read_about(health).version or row.record.version)
    _read_cache(samples, row)


def _ask_http(address: str, row: NodeStatus, access: Access) -> None:
    with _refusals(row, "/health", worst=500):
        _read_health(_get(address, "/health", access), row)
    if access.guarded and not access.key:
        return  # this machine has no readable key for its metrics
    with _refusals(row, "/metrics", worst=400):
        read_metrics(_get(address, "/metrics", access), row)


def read_metrics(text: str, row: NodeStatus) -> None:
    """Completes a row from an engine's or a proxy's `/metrics`. Raises ValueError for text that Prometheus could not read."""
    samples = read_samples(text)
    _read_cache(samples, row)
    under_way = [name for name in _IN_FLIGHT if name in samples]
    row.in_flight = int(sum(total(samples, name) for name in under_way)) if under_way else None


@contextlib.contextmanager
def _refusals(row: NodeStatus, path: str, worst: int) -> Iterator[None]:
    """Marks the node as up but degraded if it answers with an HTTP status of at least `worst`."""
    try:
        yield
    except urllib.error.HTTPError as error:
        with error:
            if error.code >= worst:
                row.state = f"degraded: {path} answers {error.code}"


def _read_health(body: str, row: NodeStatus) -> None:
    """Version and namespace, if the node registered without them."""
    told = read_about(body)
    row.record = msgspec.structs.replace(row.record, version=told.version or row.record.version)
    if row.record.fingerprint is None:
        row.record = row.record.telling(told)


def _read_cache(samples: Samples, row: NodeStatus) -> None:
    """Reads what `CacheMetrics` and prometheus_client's process collector export."""
    if "pd_cache_pool_up" in samples and not total(samples, "pd_cache_pool_up"):
        row.state = "degraded: its pool does not answer"
    tokens = {
        labels.get("outcome"): value
        for labels, value in samples.get("pd_cache_tokens_total", ())
        if labels.get("op") == "lookup"
    }
    if tokens.get("requested"):
        row.hit_rate = tokens.get("hit", 0.0) / tokens["requested"]
    row.bytes_by_tier = {
        labels["tier"]: value for labels, value in samples.get("pd_cache_tier_bytes", ()) if "tier" in labels
    }
    row.errors = {
        f"{labels.get('op') or labels.get('hop')}.{labels.get('reason')}": value
        for name in ("pd_cache_troubles_total", "pd_cache_proxy_hop_failures_total")
        for labels, value in samples.get(name, ())
        if value and labels.get("reason") != "missing"
    }
    started = samples.get("process_start_time_seconds")
    row.up_since = started[0][1] if started else None


def _get(address: str, path: str, access: Access = NOBODY) -> str:
    return fetch(f"{_known(address)}{path}", _TIMEOUT_S, access).decode(errors="replace")


def _known(address: str) -> str:
    """Returns the address. Raises ValueError if only `up` knows its port."""
    if address.endswith(":0"):
        raise ValueError("its port is 0 in this file, chosen by `up`")
    return address
