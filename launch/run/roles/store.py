"""The role `store`: a process that gives memory to the pool."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from launch.discovery import Member
from launch.run.supervise import stop_on_signals
from pd_cache.cluster import ClusterConfig, StoreNode
from transfer.errors import PoolUnavailableError


def run_store(config: ClusterConfig, node: StoreNode, ready: Callable[[str], None], member: Member) -> None:
    """Gives memory to the pool until asked to stop. Then unmounts it, so that no key points at a stopped
    node."""
    from transfer.store import MooncakeStore

    settings = config.settings_of(node)
    named = f"{settings.host}:{node.port}" if node.port else settings.host
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        store = stack.enter_context(
            MooncakeStore(
                settings.transfer, master=settings.master, host=named, segment_size=settings.segment_size
            )
        )
        # before the store is open, so that a store that waits for its master says so
        if node.metrics_port is not None:
            from prometheus_client import CollectorRegistry, ProcessCollector

            from launch.run.health_server import exposed
            from pd_cache.metrics import BackendLevels, LevelCollector

            registry, levels = CollectorRegistry(), LevelCollector()
            ProcessCollector(registry=registry)
            registry.register(levels)
            levels.add(
                lambda: BackendLevels(0, 0, 0, store.available, store.hostname, int(node.segment_size))
            )
            answers = exposed(
                node.host, node.metrics_port, registry, lambda: store.available if store.hostname else None
            )
            stack.enter_context(answers)
        deadline = time.monotonic() + config.supervisor.ready_timeout_s
        while not stop.is_set():
            try:
                store.wait_open(0.2)
            except PoolUnavailableError:
                if time.monotonic() > deadline:
                    raise
            else:
                ready(store.hostname)
                stop.wait()
                # before Mooncake's close(), which holds the GIL for longer than a lease may last
                member.leave()
