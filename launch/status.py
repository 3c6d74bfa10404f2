"""`pd-cache status`: the nodes that discovery finds and what each is doing, asked of each, in one table.

Cache servers on this machine are asked over their own connection, all others for `/health` and `/metrics`. A node that does not answer
gets a row that says so. Beside the rows there is what no node knows alone: whether discovery answers, and which nodes will never share
a hit with the others.
"""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launch.access import NOBODY, Access, proxy_access
from launch.discovery import Directory, NodeRecord, View, differences, open_directory, read_about
from launch.reachability import fetch, host_of, read_master_health, segments_at
from launch.topology import is_local
from pd_cache.config import ClusterConfig
from pd_cache.errors import PdCacheError

_SYNC_S = 5.0
_TIMEOUT_S = 2.0
_AT_A_TIME = 16
_VLLM = "vllm:"
"""The prefix of all metrics, ours included, that vLLM exports."""
_IN_FLIGHT = (
    "pd_cache_reference_queue_length",
    "pd_cache_reference_running",
    "pd_cache_proxy_requests_running",
    "num_requests_running",
    "num_requests_waiting",
)
_NOT_ASKED = "not asked"
_MOST = 2.0**62
"""More than any node can have counted; seconds and bytes are below it, too."""


class NodeStatus(msgspec.Struct, kw_only=True):
    """One row."""

    record: NodeRecord
    """As registered, or as the file says, completed by the node's own answers."""
    state: str = "up"
    """`up`, `degraded` (it answers, but not all of it works), `not asked`, or why nothing is known."""
    difference: str = ""
    """How its namespace differs from that of most nodes; empty if it does not."""
    up_since: float | None = None
    """Seconds since 1970."""
    hit_rate: float | None = None
    """Tokens found, and tokens asked for, since the start."""
    bytes_by_tier: dict[str, float] = {}
    in_flight: int | None = None
    errors: dict[str, float] = {}
    """Errors by operation and reason, since the start."""
    leads: str = ""
    """For a master: `leader`, `standby`, or what else it says it is; empty if it does not say."""
    mounted: int | None = None
    """For the leading master: bytes of memory that nodes have given to the pool, as far as it knows."""

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def asked(self) -> bool:
        """Whether it can be asked at all."""
        return not self.state.startswith(_NOT_ASKED)

    @property
    def up(self) -> bool:
        """Whether it answered, and was well."""
        return self.state.startswith("up")

    @property
    def url(self) -> str:
        """The address at which it speaks HTTP; empty if it does not."""
        return self.record.address if self.record.address.startswith("http") else self.record.metrics or ""

    @property
    def host(self) -> str:
        """The address of its machine; empty if that is unknown."""
        return host_of(self.url or self.record.address)

    @property
    def well(self) -> bool:
        """Whether no problem of it is known."""
        return (self.state == "up" or self.state.startswith(_NOT_ASKED)) and not self.difference


class ClusterStatus(msgspec.Struct, frozen=True):
    """The cluster at one moment."""

    source: str
    """The source of the list of nodes, and whether it still answers."""
    fresh: bool
    """Whether discovery answers. If not, the list may lack nodes, and may have nodes that are gone."""
    nodes: list[NodeStatus]
    unreadable: dict[str, str] = {}
    """Why a record in discovery cannot be read, by the name under which it stands."""

    @property
    def problems(self) -> list[str]:
        """Problems that no single row shows, and what to do about them."""
        masters = [node for node in self.nodes if node.record.role == "master"]
        leading = [node.name for node in masters if node.leads == LEADER]
        asked = [node for node in masters if node.asked]
        if not asked:
            return []
        if not leading:
            return [f"none of {len(masters)} masters leads: there are no hits, and nothing is stored; {_NO_LEADER}"]
        if len(leading) > 1:
            names = ", ".join(leading)
            return [f"{len(leading)} masters lead ({names}): each knows only some of the keys; {_TWO_LEADERS}"]
        promised = sum(node.record.capacity.segment_bytes for node in self.nodes)
        mounted = next((node.mounted for node in masters if node.leads == LEADER), None)
        if mounted is not None and mounted < promised:
            return [
                f"{leading[0]} has {shown_bytes(mounted)} of the {shown_bytes(promised)} that nodes give; {_NO_MEMORY}"
            ]
        return []

    @property
    def well(self) -> bool:
        """Whether discovery and all nodes answer, one master leads, no namespace differs, and every record can be read."""
        return self.fresh and not self.unreadable and all(node.well for node in self.nodes) and not self.problems


LEADER = "leader"
_NO_LEADER = (
    "a master that runs alone needs a start (its row says more); elected ones lead again 15 s after etcd "
    "answers (`etcdctl endpoint health`), and within a minute where it lost its data"
)
_NO_MEMORY = "nodes that follow another master, as after a loss of etcd's data, find this one when they are restarted"
_TWO_LEADERS = "restart those whose address is not in etcd (`etcdctl get --prefix mooncake-store/`)"
Samples = dict[str, list[tuple[dict[str, str], float]]]


def cluster_status(config: ClusterConfig) -> ClusterStatus:
    """Ask discovery, then every node, all at the same time; each has a few seconds to answer."""
    with open_directory(config) as directory:
        directory.wait_synced(_SYNC_S)
        return _look(config, directory)


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
    return ClusterStatus(_source(config, view, synced), fresh, rows, dict(view.unreadable))


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
        if record.role == "store":
            row.state = f"{_NOT_ASKED}: it takes no questions; its memory shows in the master's row"
        elif record.role == "master":
            _ask_master(row)
        elif record.role == "cache-server":
            _ask_server(row)
        elif record.address.startswith("http"):
            _ask_http(record.address, row, access if record.role == "proxy" else NOBODY)
        else:
            row.state = _NOT_ASKED
    except OSError as error:
        row.state = f"no answer: {getattr(error, 'reason', error)}"
    except (PdCacheError, ValueError) as error:
        row.state = f"no answer: {error}"
    return row


def _ask_server(row: NodeStatus) -> None:
    address, metrics = row.record.address, row.record.metrics
    if (
        metrics is not None
        and address.startswith("ipc://")
        and not is_local(urllib.parse.urlsplit(metrics).hostname or "")
    ):
        _read_cache(_samples(_get(metrics, "/metrics")), row)
        return
    if address.endswith(":0"):
        raise ValueError("its address depends on a port that is 0 in this file, chosen by `up`")

    from pd_cache.client.observer import server_status

    report = server_status(address, _TIMEOUT_S)
    _read_cache(_samples(report.metrics), row)
    row.state = "up" if report.available or not report.workers else "degraded: its pool does not answer"
    row.up_since, row.in_flight = report.up_since, report.in_flight
    row.record = msgspec.structs.replace(row.record, version=report.software)


def _ask_master(row: NodeStatus) -> None:
    if row.record.metrics is None:
        row.state = f"{_NOT_ASKED}: it does not tell where its metrics are"
        return
    row.leads = master_role(row.record.metrics)
    if row.leads == LEADER:
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            row.mounted = sum(segment.size_bytes for segment in segments_at(row.record.metrics))
    samples = _samples(_get(row.record.metrics, "/metrics"))
    row.bytes_by_tier = {"mooncake": _total(samples, "master_allocated_bytes")}
    refused = _total(samples, "master_put_start_alloc_failures_total")
    row.errors = {"store.no_space": refused} if refused else {}


def master_role(metrics: str) -> str:
    """Returns what a master says about itself: `leader`, `standby` and so on. Raises OSError or ValueError if it does not answer."""
    health = read_master_health(_get(metrics, "/health").encode())
    return "leads, but does not serve yet" if health.role == LEADER and not health.service_ready else health.role


def _ask_http(address: str, row: NodeStatus, access: Access) -> None:
    with _refusals(row, "/health", worst=500):
        _read_health(_get(address, "/health", access), row)
    if access.guarded and not access.key:
        return  # this machine has no readable key for its metrics
    with _refusals(row, "/metrics", worst=400):
        read_metrics(_get(address, "/metrics", access), row)


def read_metrics(text: str, row: NodeStatus) -> None:
    """Completes a row from an engine's or a proxy's `/metrics`. Raises ValueError for text that Prometheus could not read."""
    samples = _samples(text)
    _read_cache(samples, row)
    under_way = [name for name in _IN_FLIGHT if name in samples]
    row.in_flight = int(sum(_total(samples, name) for name in under_way)) if under_way else None


@contextlib.contextmanager
def _refusals(row: NodeStatus, path: str, worst: int) -> Iterator[None]:
    """A node that answers with a status of at least `worst` is up, but degraded."""
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
        row.record = msgspec.structs.replace(row.record, fingerprint=told.fingerprint, namespace=told.namespace)


def _read_cache(samples: Samples, row: NodeStatus) -> None:
    """Reads what `CacheMetrics` and prometheus_client's process collector export."""
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
    if address.endswith(":0"):
        raise ValueError("its port is 0 in this file, chosen by `up`")
    return fetch(f"{address}{path}", _TIMEOUT_S, access).decode(errors="replace")


def _samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not 0 <= sample.value < _MOST:  # not a number, infinite, or negative: not one of our counts
                continue
            found.setdefault(sample.name.removeprefix(_VLLM), []).append((sample.labels, sample.value))
    return found


def _total(samples: Samples, name: str) -> float:
    return sum(value for _, value in samples.get(name, ()))


# --- showing it ------------------------------------------------------------------------------------------------------


def status_table(status: ClusterStatus) -> Group:
    """Returns the cluster's state as text for people."""
    table = Table()
    for column in ("node", "role"):
        table.add_column(column, no_wrap=True)
    for column in ("state", "up since", "hit rate", "bytes by tier", "in flight", "errors by reason"):
        table.add_column(column)
    for row in status.nodes:
        table.add_row(
            row.name,
            row.record.role,
            escape(f"{row.state}, {row.leads}" if row.leads else row.state),
            _shown_time(row.up_since),
            "" if row.hit_rate is None else f"{row.hit_rate:.1%}",
            escape("\n".join(f"{tier} {shown_bytes(value)}" for tier, value in row.bytes_by_tier.items())),
            "" if row.in_flight is None else str(row.in_flight),
            escape("\n".join(f"{reason} {count:.0f}" for reason, count in row.errors.items())),
        )
    differing = [Text(f"{row.name}: {row.difference}", "yellow") for row in status.nodes if row.difference]
    unreadable = [Text(f"{name}: its record cannot be read: {why}", "red") for name, why in status.unreadable.items()]
    problems = [Text(problem, "red") for problem in status.problems]
    return Group(Text(f"discovery: {status.source}"), table, *problems, *differing, *unreadable)


def _shown_time(at: float | None) -> str:
    if at is None:
        return ""
    try:
        return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # a node can send any number
        return f"{at:g}"


def watch(config: ClusterConfig, interval: float = 2.0) -> None:
    """Show the table, again and again, until Ctrl-C. Discovery is followed meanwhile: an outage shows as one."""
    try:
        with open_directory(config) as directory, Live(console=Console(), auto_refresh=False) as live:
            directory.wait_synced(_SYNC_S)
            while True:
                live.update(status_table(_look(config, directory)), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def as_json(status: ClusterStatus) -> str:
    """Returns the cluster's state for scripts: one JSON object, in which a node's record and its row are one."""
    nodes = []
    for row in status.nodes:
        shown = msgspec.to_builtins(row)
        nodes.append({**shown.pop("record"), **shown})
    return msgspec.json.encode(
        {
            "discovery": status.source,
            "well": status.well,
            "problems": status.problems,
            "nodes": nodes,
            "unreadable": status.unreadable,
        }
    ).decode()


def shown_bytes(value: float) -> str:
    """Returns a number of bytes as text for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
