"""What the reference engine counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class EngineMetrics:
    """The metrics of one engine, in a registry of its own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        name = "pd_cache_reference_{}".format
        self.queued = Gauge(name("queue_length"), "Requests that wait", registry=registry)
        self.running = Gauge(name("running"), "Requests that load or compute", registry=registry)
        self.free_blocks = Gauge(name("free_blocks"), "Blocks of the paged buffer in no use", registry=registry)
        self.requests = Counter(
            name("requests"),
            "Requests by outcome: stop, length, aborted, timeout, failed, closed, rejected (queue full), invalid",
            ["outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter(name("prompt_tokens"), "Prompt tokens of prompts completed", registry=registry)
        self.cached_tokens = Counter(name("cached_tokens"), "Prompt tokens loaded from the pool", registry=registry)
        self.computed_tokens = Counter(name("computed_tokens"), "Prompt tokens computed", registry=registry)
        self.output_tokens = Counter(name("output_tokens"), "Tokens generated", registry=registry)
        self.loads = Counter(
            name("loads"),
            "Loads from the cache by outcome: hit, miss, unavailable, failed, cancelled, timeout, busy",
            ["outcome"],
            registry=registry,
        )
        self.stores = Counter(
            name("stores"), "Stores into the cache by outcome: done, failed, dropped", ["outcome"], registry=registry
        )
        self.ttft = Histogram(
            name("ttft_seconds"), "From a request's arrival to its first token", buckets=_SECONDS, registry=registry
        )
        self.load_time = Histogram(
            name("load_seconds"), "What a request waited for the cache", buckets=_SECONDS, registry=registry
        )
        self.prompt_length = Histogram(name("prompt_length_tokens"), "Prompts", buckets=_TOKENS, registry=registry)
        self.output_length = Histogram(name("output_length_tokens"), "Outputs", buckets=_TOKENS, registry=registry)
