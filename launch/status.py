"""`pd-cache status`: what the nodes of a file are doing, asked of each, in one table.

Cache servers are asked over their own connection, all others for `/health` and `/metrics`. A node that does not answer is a
row that says so.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pd_cache.config import CacheServerNode, ClusterConfig, MasterNode, Node, StoreNode
from pd_cache.errors import PdCacheError

_TIMEOUT_S = 2.0
_LARGEST_ANSWER = 16 << 20
_VLLM = "vllm:"
"""Before the names of metrics, ours included, that vLLM gives out."""
_IN_FLIGHT = (
    "pd_cache_reference_queue_length",
    "pd_cache_reference_running",
    "pd_cache_proxy_requests_running",
    "num_requests_running",
    "num_requests_waiting",
)


class NodeStatus(msgspec.Struct, kw_only=True):
    """One row."""

    name: str
    role: str
    state: str
    """`up`, `degraded` (it answers, but not all of it works), or why nothing is known."""
    up_since: float | None = None
    """Seconds since 1970."""
    hit_rate: float | None = None
    """Tokens found of those asked for, since the start."""
    bytes_by_tier: dict[str, float] = {}
    in_flight: int | None = None
    errors: dict[str, float] = {}
    """By operation and reason, since the start."""


Samples = dict[str, list[tuple[dict[str, str], float]]]


def cluster_status(config: ClusterConfig) -> list[NodeStatus]:
    """Ask every node of the cluster, all at the same time; each has a few seconds to answer."""
    with ThreadPoolExecutor(max(1, min(16, len(config.nodes))), "pd-cache-status") as threads:
        return list(threads.map(lambda node: _ask(config, node), config.nodes))


def _ask(config: ClusterConfig, node: Node) -> NodeStatus:
    row = NodeStatus(name=node.name, role=node.role, state="up")
    try:
        if isinstance(node, CacheServerNode):
            _ask_server(config, node, row)
        elif isinstance(node, MasterNode):
            _ask_master(node, row)
        elif isinstance(node, StoreNode):
            row.state = "not asked: it takes no questions; its memory shows in the master's row"
        else:
            _ask_http(node.host, node.port, row)
    except (OSError, urllib.error.URLError) as error:
        row.state = f"no answer: {getattr(error, 'reason', error)}"
    except (PdCacheError, ValueError) as error:
        row.state = f"no answer: {error}"
    return row


def _ask_server(config: ClusterConfig, node: CacheServerNode, row: NodeStatus) -> None:
    from pd_cache.server.client import CacheClient
    from pd_cache.server.messages import StatusQuery, StatusReport

    if not node.url and not config.master.port:
        raise ValueError("its address depends on the master's port, which is 0 in this file")
    client = CacheClient(config.server_url(node), None, kind="observer", connect_timeout_s=_TIMEOUT_S)
    try:
        report = client.ask(StatusQuery(), _TIMEOUT_S)
    finally:
        client.close()
    assert isinstance(report, StatusReport)
    _read_cache(_samples(report.metrics), row)
    row.state = "up" if report.available or not report.workers else "degraded: its pool does not answer"
    row.up_since, row.in_flight = report.up_since, report.in_flight


def _ask_master(node: MasterNode, row: NodeStatus) -> None:
    samples = _samples(_get(node.host, node.metrics_port, "/metrics"))
    row.bytes_by_tier = {"mooncake": _total(samples, "master_allocated_bytes")}
    refused = _total(samples, "master_put_start_alloc_failures_total")
    row.errors = {"store.no_space": refused} if refused else {}


def _ask_http(host: str, port: int, row: NodeStatus) -> None:
    try:
        _get(host, port, "/health")
    except urllib.error.HTTPError as error:
        with error:
            row.state = f"degraded: /health answers {error.code}"
    samples = _samples(_get(host, port, "/metrics"))
    _read_cache(samples, row)
    under_way = [name for name in _IN_FLIGHT if name in samples]
    row.in_flight = int(sum(_total(samples, name) for name in under_way)) if under_way else None


def _read_cache(samples: Samples, row: NodeStatus) -> None:
    """What `CacheMetrics` and prometheus_client's process collector tell."""
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


def _get(host: str, port: int, path: str) -> str:
    if not port:
        raise ValueError("its port is 0 in this file, chosen by `up`")
    with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=_TIMEOUT_S) as answer:
        return str(answer.read(_LARGEST_ANSWER).decode(errors="replace"))


def _samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix(_VLLM), []).append((sample.labels, sample.value))
    return found


def _total(samples: Samples, name: str) -> float:
    return sum(value for _, value in samples.get(name, ()))


# --- showing it ------------------------------------------------------------------------------------------------------


def status_table(rows: list[NodeStatus]) -> Table:
    """The rows for people."""
    table = Table()
    for column in ("node", "role"):
        table.add_column(column, no_wrap=True)
    for column in ("state", "up since", "hit rate", "bytes by tier", "in flight", "errors by reason"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row.name,
            row.role,
            row.state,
            "" if row.up_since is None else f"{datetime.fromtimestamp(row.up_since):%Y-%m-%d %H:%M:%S}",
            "" if row.hit_rate is None else f"{row.hit_rate:.1%}",
            "\n".join(f"{tier} {_bytes(value)}" for tier, value in row.bytes_by_tier.items()),
            "" if row.in_flight is None else str(row.in_flight),
            "\n".join(f"{reason} {count:.0f}" for reason, count in row.errors.items()),
        )
    return table


def watch(ask: Callable[[], list[NodeStatus]], interval: float = 2.0) -> None:
    """Show the table, again and again, until Ctrl-C."""
    try:
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                live.update(status_table(ask()), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def as_json(rows: list[NodeStatus]) -> str:
    """The rows for scripts: one JSON object, as `status_table` has them."""
    return msgspec.json.encode({"nodes": rows}).decode()


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
