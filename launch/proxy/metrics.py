"""What the proxy says of itself: `/health`, `/metrics`, `/peers`, and `/requests/ID`, of the last requests.

A node's answer holds a report on the prompt (docs/troubleshooting.md). The proxy passes answers on as they come, and looks only at their ends. vLLM's
streams hold no report; the node itself still has it. If clients need keys, a client without one learns from `/health` only whether the
proxy can serve.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

import pd_cache
from launch.openai import ApiError
from launch.proxy.keys import Admission, Keys
from launch.proxy.nodes import NodePools
from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.reasons import KEY, RecentReports, RequestReport
from transfer.settings import mooncake_version

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ProxyMetrics:
    """Keeps metrics in its own registry, so that several proxies can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=_SECONDS)
        self.requests = counter(
            "pd_cache_proxy_requests",
            "Requests, by the status that the client was sent (499: it went away)",
            ["status"],
        )
        self.cut = counter(
            "pd_cache_proxy_answers_cut", "Answers that ended after their first byte with an error", ["code"]
        )
        self.hop_failures = counter(
            "pd_cache_proxy_hop_failures", "Requests that a node failed, by how", ["hop", "reason"]
        )
        self.retries_refused = counter(
            "pd_cache_proxy_retries_refused",
            "Requests that failed on one node and were not sent to another, because too many others had been",
        )
        self.handoffs = counter(
            "pd_cache_proxy_handoffs",
            "Prompts, by what the decode node was given: handed_over, nothing_stored, prefill_failed, no_prefill_nodes; or why "
            "it was asked directly: short, in_pool",
            ["result"],
        )
        self.running = gauge("pd_cache_proxy_requests_running", "Requests in flight")
        self.node_up = gauge("pd_cache_proxy_node_up", "0 while a node is skipped", ["hop", "node"])
        self.node_load = gauge(
            "pd_cache_proxy_node_load",
            "Work given to a node and not done: prompt tokens for prefill, requests for decode",
            ["hop", "node"],
        )
        self.view_stale = gauge("pd_cache_proxy_view_stale_seconds", "For how long discovery has not answered")
        self.hints = counter(
            "pd_cache_proxy_hints",
            "Actions of hints: retain, release, prefetch or other; accepted, clipped or refused",
            ["action", "outcome"],
        )
        self.pins = gauge("pd_cache_proxy_pins", "Prompts that are kept in the pool")
        self.pinned_bytes = gauge("pd_cache_proxy_pinned_bytes", "What these may take of the pool's memory")
        self.pinned_objects = gauge(
            "pd_cache_proxy_pinned_objects", "Objects of these that the pool has; 0 if it does not answer"
        )
        self.tenant_requests = counter(
            "pd_cache_proxy_tenant_requests",
            "Completions of a tenant; counted is `no` if the prompt could not be named, and does not count for the quota",
            ["tenant", "counted"],
        )
        self.tenant_tokens = counter(
            "pd_cache_proxy_tenant_tokens",
            "Tokens of a tenant's prompts, as they were looked up in the pool: requested and found",
            ["tenant", "outcome"],
        )
        self.tenant_evicted = counter(
            "pd_cache_proxy_tenant_evicted_chunks", "Chunks that were removed because of the tenant's quota", ["tenant"]
        )
        self.tenant_bytes = gauge(
            "pd_cache_proxy_tenant_bytes", "What the pool holds for a tenant with a quota, at most", ["tenant"]
        )
        self.tenant_quota = gauge(
            "pd_cache_proxy_tenant_quota_bytes", "This proxy's part of the tenant's quota", ["tenant"]
        )
        self.prefill_seconds = histogram(
            "pd_cache_proxy_prefill_seconds", "From a request's arrival to the end of its prefill hop"
        )
        self.first_byte_seconds = histogram(
            "pd_cache_proxy_first_byte_seconds", "From a completion's arrival to its first byte from the decode node"
        )


REPORT_BYTES = 1 << 14
"""A report lies within so many bytes of an answer's end."""
_MARK = f'"{KEY}"'.encode()


class HopReport(msgspec.Struct, frozen=True):
    hop: str
    node: str
    """The node's URL."""
    report: RequestReport | None = None
    """None if its answer held none."""


class Trip(msgspec.Struct, frozen=True):
    """A request's way through the nodes."""

    client: str
    """The name of the client's key; empty if clients need no keys."""
    hops: tuple[HopReport, ...]


class RecentTrips:
    """The last requests. Clients may use the same ids: each sees its own request. Thread-safe."""

    def __init__(self) -> None:
        self._trips: RecentReports[Trip] = RecentReports(2000)

    def note(self, request_id: str, trip: Trip) -> None:
        for key in (request_id, f"{trip.client} {request_id}"):
            self._trips.note(key, trip)

    def get(self, request_id: str, client: str | None) -> Trip | None:
        """Returns a client's request; None if it is not among the last ones. If `client` is None, returns the last request of that id."""
        return self._trips.get(request_id if client is None else f"{client} {request_id}")


def read_report(answer: bytes) -> RequestReport | None:
    """Returns the last report in a node's answer or in the end of one; None if there is none.

    A report is a flat object, so it ends at the first closing brace. Inside a JSON string, such as a generated text, the quotes around the
    key would be escaped.
    """
    _, mark, rest = answer[-REPORT_BYTES:].rpartition(_MARK)
    value = rest.lstrip()
    end = value.find(b"}")
    if not mark or value[:1] != b":" or end < 0:
        return None
    try:
        return decode_json(value[1 : end + 1], RequestReport)
    except UndecodableError:
        return None


Peers = Callable[[], Awaitable[Mapping[str, Any]]]
"""Reports which of the cluster's other nodes this proxy reaches."""


class Overview:
    def __init__(
        self,
        pools: NodePools,
        keys: Keys,
        admission: Admission,
        metrics: ProxyMetrics,
        trips: RecentTrips,
        peers: Peers | None,
    ) -> None:
        """Without `peers` there is no `/peers`."""
        self._node_pools = pools
        self._keys = keys
        self._admission = admission
        self._metrics = metrics
        self._trips = trips
        self._peers = peers

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._samples)
        app.router.add_get("/requests/{id}", self._trip)
        if self._peers is not None:
            app.router.add_get("/peers", self._reached)

    async def _health(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        nodes: dict[str, dict[str, bool]] = {hop: pool.health(now) for hop, pool in self._node_pools.pools.items()}
        healthy = any(nodes["decode"].values()) and not self._admission.closing
        body: dict[str, Any] = {"status": "ok" if healthy else "unavailable"}
        if self._keys.may_watch(request.headers.get("Authorization")):
            body |= {
                "version": pd_cache.__version__,
                "mooncake": mooncake_version(),
                **nodes,
                **self._node_pools.describe(now),
            }
        return web.json_response(body, status=200 if healthy else 503)

    async def _samples(self, request: web.Request) -> web.Response:
        self._keys.check_watcher(request.headers.get("Authorization"))
        now = time.monotonic()
        metrics = self._metrics
        metrics.node_up.clear()  # also for nodes that have left
        metrics.node_load.clear()
        for hop, pool in self._node_pools.pools.items():
            for node, up in pool.health(now).items():
                metrics.node_up.labels(hop, node).set(up)
            for node, load in pool.loads().items():
                metrics.node_load.labels(hop, node).set(load)
        metrics.view_stale.set(self._node_pools.stale_s(now))
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _trip(self, request: web.Request) -> web.Response:
        only = self._keys.visible_client(request.headers.get("Authorization"))
        trip = self._trips.get(request.match_info["id"], only and only.name)
        if trip is None:
            raise ApiError(404, "No such request among the last ones", code="not_found")
        return web.json_response(msgspec.to_builtins(trip))

    async def _reached(self, request: web.Request) -> web.Response:
        self._keys.check_watcher(request.headers.get("Authorization"))
        assert self._peers is not None
        return web.json_response(await self._peers())
