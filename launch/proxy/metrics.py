"""The proxy's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ProxyMetrics:
    """Keeps metrics in its own registry, so that several proxies can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "pd_cache_proxy_requests",
            "Requests, by the status that the client was sent (499: it went away)",
            ["status"],
            registry=self.registry,
        )
        self.cut = Counter(
            "pd_cache_proxy_answers_cut",
            "Answers that ended after their first byte with an error",
            ["code"],
            registry=self.registry,
        )
        self.connections_closed = Counter(
            "pd_cache_proxy_connections_closed",
            "Clients' connections that the proxy closed: too_many, no_head in time, idle, unread",
            ["why"],
            registry=self.registry,
        )
        self.hop_failures = Counter(
            "pd_cache_proxy_hop_failures",
            "Requests that a node failed, by how",
            ["hop", "reason"],
            registry=self.registry,
        )
        self.retries_refused = Counter(
            "pd_cache_proxy_retries_refused",
            "Requests that failed on one node and were not sent to another, because too many others had been",
            registry=self.registry,
        )
        self.handoffs = Counter(
            "pd_cache_proxy_handoffs",
            "Prompts, by what the decode node was given: handed_over, nothing_stored, prefill_failed, no_prefill_nodes; or why "
            "it was asked directly: short, in_pool",
            ["result"],
            registry=self.registry,
        )
        self.running = Gauge("pd_cache_proxy_requests_running", "Requests in flight", registry=self.registry)
        self.node_up = Gauge(
            "pd_cache_proxy_node_up", "0 while a node is skipped", ["hop", "node"], registry=self.registry
        )
        self.node_load = Gauge(
            "pd_cache_proxy_node_load",
            "Work given to a node and not done: prompt tokens for prefill, requests for decode",
            ["hop", "node"],
            registry=self.registry,
        )
        self.view_stale = Gauge(
            "pd_cache_proxy_view_stale_seconds", "For how long discovery has not answered", registry=self.registry
        )
        self.prefill_seconds = Histogram(
            "pd_cache_proxy_prefill_seconds",
            "From a request's arrival to the end of its prefill hop",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_byte_seconds = Histogram(
            "pd_cache_proxy_first_byte_seconds",
            "From a completion's arrival to its first byte from the decode node",
            buckets=_SECONDS,
            registry=self.registry,
        )
