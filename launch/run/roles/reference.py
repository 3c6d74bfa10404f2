"""The roles `prefill` and `decode` with the engine that ships with pd-cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector

from launch.discovery import Member
from launch.engines.reference.api import ReferenceServer, serve
from launch.engines.reference.engine import ReferenceEngine
from launch.run.supervise import stop_on_signals
from pd_cache.cache import BlockCache, CacheEngine, CacheEngineBuilder
from pd_cache.chunks import CacheMetadata
from pd_cache.cluster import CacheServerNode, ClusterConfig, EngineNode, ReferenceEngineConfig
from pd_cache.errors import ConfigError
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.server.client import RemoteCache
from pd_cache.server.protocol import EngineIdentity
from pd_cache.tracing import open_tracing
from pd_cache.versions import WeightsVersion

if TYPE_CHECKING:
    import torch


def run_reference_engine(
    config: ClusterConfig, node: EngineNode, ready: Callable[[str], None], member: Member
) -> None:
    """Serves with the engine that ships with pd-cache, in this process."""
    engine_config = config.engine
    assert isinstance(engine_config, ReferenceEngineConfig)  # the file's checks ensure this
    settings = config.settings_of(node)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)

    tracing, version = open_tracing(config.tracing, node.role, node.name), WeightsVersion()
    opened: list[BlockCache] = []

    def open_cache(
        metadata: CacheMetadata, layout: KVLayout, kv_caches: dict[str, torch.Tensor]
    ) -> BlockCache:
        metrics = CacheMetrics(registry)
        server = config.node(node.cache_server) if node.cache_server else None
        cache: CacheEngine | RemoteCache
        if isinstance(server, CacheServerNode):
            identity = EngineIdentity.of(metadata, config.cache)
            cache = RemoteCache(config.server_url(server), identity, metrics=metrics, version=version)
        else:
            try:
                cache = CacheEngineBuilder.get_or_create(
                    node.name, settings, metadata, layout, metrics=metrics, version=version
                )
            except ValueError as error:  # the file cannot know how large a chunk of this model is
                raise ConfigError(
                    f"transfer.staging_size: {settings.transfer.staging_size}: {error}"
                ) from None
        opened.append(cache)
        cache.register_kv_caches(kv_caches)
        space = metadata.namespace(config.cache).described()
        member.about = msgspec.structs.replace(member.about, streams=True, **space)
        return cache

    def open_server() -> ReferenceServer:
        engine = ReferenceEngine.open(engine_config, config.handoff, open_cache, tracing)
        return ReferenceServer(engine, registry, lambda: msgspec.to_builtins(member.about), tracing, version)

    with (
        stop_on_signals() as stop
    ):  # also while the cache unmounts: a second signal must not leave its keys behind
        try:
            # it leaves first, so that no proxy sends new requests
            serve(open_server, node.host, node.port, ready, stop, member.leave)
        finally:
            CacheEngineBuilder.destroy(node.name)
            for cache in opened:
                cache.close()
            tracing.close()
