"""The proxy's counters, and the nodes' reports on its last requests.

A node's answer holds a report on the prompt (docs/troubleshooting.md). The proxy passes answers on as they
come, and looks only at their ends. vLLM's streams hold no report; the node itself still has it.
"""

from __future__ import annotations

import time
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from launch.openai import ApiError, RecentReports
from launch.proxy.keys import Client
from launch.proxy.nodes import NodePools
from launch.proxy.trips import Trip
from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.reasons import KEY, RequestReport

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
            "Requests, by the status that the client got (499: the client went away)",
            ["status"],
        )
        self.cut = counter(
            "pd_cache_proxy_answers_cut",
            "Answers that failed after their first byte, by the error's code",
            ["code"],
        )
        self.hop_failures = counter(
            "pd_cache_proxy_hop_failures", "Requests that a node failed, by reason", ["hop", "reason"]
        )
        self.handoffs = counter(
            "pd_cache_proxy_handoffs",
            "Prompts, by the result of the prefill hop: handed_over, nothing_stored, prefill_failed, prefill_refused, "
            "or by the reason for none: short, in_pool, scored, no_prefill_nodes, not_worth",
            ["result"],
        )
        self.running = gauge("pd_cache_proxy_requests_running", "Requests in flight")
        self.hints = counter(
            "pd_cache_proxy_hints",
            "Actions of hints: retain, release, prefetch or other; accepted, clipped or refused",
            ["action", "outcome"],
        )
        self.pins = gauge("pd_cache_proxy_pins", "Prompts that are kept in the pool")
        self.pinned_bytes = gauge(
            "pd_cache_proxy_pinned_bytes", "The most bytes of the pool that pinned prompts can take"
        )
        self.pinned_objects = gauge(
            "pd_cache_proxy_pinned_objects",
            "Objects of pinned prompts in the pool; 0 if the pool does not answer",
        )
        self.tenant_requests = counter(
            "pd_cache_proxy_tenant_requests", "Completions of the tenants of proxy.tenants_file", ["tenant"]
        )
        self.tenant_tokens = counter(
            "pd_cache_proxy_tenant_tokens",
            "Tokens of the tenants' prompts that were looked up in the pool: requested, or found there",
            ["tenant", "outcome"],
        )
        self.prefill_seconds = histogram(
            "pd_cache_proxy_prefill_seconds", "Time from a request's arrival to the end of its prefill hop"
        )
        self.first_byte_seconds = histogram(
            "pd_cache_proxy_first_byte_seconds", "Time from a completion's arrival to its answer's first byte"
        )
        self.refused = counter(
            "pd_cache_proxy_refused",
            "Requests that were refused with 429, by reason: rate_limit_exceeded, over_ttft_s, over_token_s",
            ["code"],
        )
        self.prediction_error = Histogram(
            "pd_cache_proxy_prediction_error",
            "Error of the predicted time to the first byte, as a share of the measured time",
            buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0),
            registry=self.registry,
        )

    def page(self, pools: NodePools) -> bytes:
        """Returns all metrics as text for Prometheus, including the metrics of the present nodes."""
        now, registry = time.monotonic(), CollectorRegistry()
        gauge = partial(Gauge, registry=registry)
        up = gauge("pd_cache_proxy_node_up", "0 while a node is skipped", ["hop", "node"])
        load = gauge(
            "pd_cache_proxy_node_load",
            "Work given to a node and not done: prompt tokens for prefill, requests for decode",
            ["hop", "node"],
        )
        role = gauge(
            "pd_cache_proxy_node_role",
            "1 for the present role of a node of the role both (proxy.roles)",
            ["hop", "node"],
        )
        stale = gauge("pd_cache_proxy_view_stale_seconds", "Seconds for which discovery has not answered")
        stale.set(pools.stale_s(now))
        for hop, pool in pools.pools.items():
            for url, well in pool.health(now).items():
                up.labels(hop, url).set(well)
                load.labels(hop, url).set(pool.nodes[url].load)
            for node, known in ({} if pools.roles is None else pools.roles.now).items():
                role.labels(hop, node).set(known.does == hop)
        return generate_latest(self.registry) + generate_latest(registry)


REPORT_BYTES = 1 << 14
"""A report lies within this many bytes of an answer's end."""
_MARK = f'"{KEY}"'.encode()


class RecentTrips:
    """The last requests. Clients may use the same ids: each sees its own request."""

    def __init__(self) -> None:
        self._trips: RecentReports[Trip] = RecentReports(2000)

    def note(self, request_id: str, trip: Trip) -> None:
        for key in (request_id, f"{trip.client} {request_id}"):
            self._trips.note(key, trip)

    def get(self, request_id: str, client: Client | None) -> Trip:
        """Returns a client's request; if `client` is None, the last request of that id. Raises ApiError 404
        if the request is not known any more."""
        trip = self._trips.get(request_id if client is None else f"{client.name} {request_id}")
        if trip is None:
            raise ApiError(404, "No such request among the last ones", code="not_found")
        return trip


def read_report(answer: bytes | bytearray) -> RequestReport | None:
    """Returns the last report in a node's answer or in the end of one; None if there is none.

    A report is a flat object, so it ends at the first closing brace. Inside a JSON string, such as a
    generated text, the quotes around the key would be escaped.
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
