"""The role `cache-server`: the cache of this host's engines."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

from prometheus_client import ProcessCollector

from launch.discovery import Member
from launch.run.health_server import exposed
from launch.run.supervise import stop_on_signals
from pd_cache.cluster import CacheServerNode, ClusterConfig
from pd_cache.metrics import CacheMetrics
from pd_cache.server.server import CacheServer


def run_cache_server(
    config: ClusterConfig, node: CacheServerNode, ready: Callable[[str], None], member: Member
) -> None:
    """Serves the cache of this host's engines until asked to stop."""
    # copying and answering threads share the interpreter; without this, a lookup would wait 5 ms for its turn
    sys.setswitchinterval(0.0005)
    metrics = CacheMetrics()
    ProcessCollector(registry=metrics.registry)
    serving: list[CacheServer] = []

    def available() -> bool | None:
        return serving[0].available if serving else None

    with stop_on_signals() as stop, exposed(node.host, node.metrics_port, metrics.registry, available):
        server = CacheServer(
            config.settings_of(node),
            node,
            config.server_url(node),
            metrics=metrics,
            lease_s=config.lease_ttl_ms / 1000,
        )
        try:
            # a full collection would stop every thread for 0.1 s, nearly all of it for lasting objects of
            # imports
            gc.collect()
            gc.freeze()
            serving.append(server)
            ready(server.url)
            stop.wait()
        finally:
            member.leave()
            server.close()
