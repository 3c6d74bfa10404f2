"""The cache of a worker: an engine in its process, or the cache server of its host."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch

from pd_cache.cache import BlockCache, CacheEngineBuilder
from pd_cache.chunks import CacheMetadata
from pd_cache.config import NodeSettings
from pd_cache.errors import ConfigError, NoAnswerError
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.paged import host_pin
from pd_cache.server.client import RemoteCache
from pd_cache.server.memory import SharingError
from pd_cache.server.protocol import EngineIdentity
from pd_cache.tiers import open_backend
from pd_cache.versions import WeightsVersion
from pd_cache.vllm.settings import Settings
from transfer.settings import MIN_SEGMENT

log = logging.getLogger("vllm.pd_cache")

_CONNECT_S = 10.0
"""How long a worker waits for a cache server when it starts. It also finds a server that comes later."""


class WorkerGroup(NamedTuple):
    """A group of layers of one worker."""

    metadata: CacheMetadata
    layout: KVLayout
    kv_caches: Sequence[torch.Tensor]
    stores: bool
    """False if an earlier rank has the same KV, and stores it."""


def open_caches(
    settings: Settings,
    groups: Sequence[WorkerGroup],
    instance: str,
    rank: int,
    ranks: int,
    metrics: CacheMetrics,
    version: WeightsVersion,
    stack: contextlib.ExitStack,
) -> Sequence[BlockCache]:
    """Returns a cache for each layer group of worker `rank` of the `ranks` of all pipeline stages. Does not
    wait for the pool.

    `stack` closes them. Raises ConfigError for settings that cannot work, and ServerRefusedError, with the
    server's reason, if a cache server refuses this worker.
    """
    node = settings.node
    shards = (group.layout.shard(group.metadata.shards_per_rank) for group in groups)
    sizes = [shard.chunk_bytes(node.cache.chunk_tokens) for shard in shards]
    if settings.server_url is not None:
        return [
            _open_server(settings.server_url, settings, group, sizes, metrics, version, stack)
            for group in groups
        ]
    node = _of_rank(node, rank, ranks)
    try:
        backend = open_backend(node, max(sizes), pin=host_pin(), metrics=metrics)
    except ValueError as error:  # the checks of the file cannot know how large this model's chunks are
        raise ConfigError(f"transfer.staging_size: {node.transfer.staging_size}: {error}") from None
    stack.callback(backend.close)
    engines = []
    for place, group in enumerate(groups):
        name = engine_name(instance, place)
        engine = CacheEngineBuilder.get_or_create(
            name,
            node,
            group.metadata,
            group.layout,
            metrics=metrics,
            backend=lambda *_: backend,
            version=version,
        )
        stack.callback(CacheEngineBuilder.destroy, name)
        engine.register_kv_caches(group.kv_caches)
        engines.append(engine)
    return engines


def engine_name(instance: str, place: int) -> str:
    """Returns the name under which `CacheEngineBuilder` knows the engine of a group of layers."""
    return f"{instance}/{place}"


def _open_server(
    url: str,
    settings: Settings,
    group: WorkerGroup,
    object_sizes: Sequence[int],
    metrics: CacheMetrics,
    version: WeightsVersion,
    stack: contextlib.ExitStack,
) -> RemoteCache:
    """Returns the cache of a layer group at a server, which reads and writes the group's tensors."""
    identity = EngineIdentity.of(group.metadata, settings.node.cache)
    if len(object_sizes) > 1:
        identity = msgspec.structs.replace(identity, object_sizes=tuple(object_sizes))
    cache = RemoteCache(url, identity, metrics=metrics, version=version)
    stack.callback(cache.close)
    try:
        cache.connection.wait_ready(_CONNECT_S)
    except NoAnswerError:
        log.warning("pd-cache: no cache server at %s yet; prompts are computed until one comes", url)
    else:
        log.info("pd-cache: the cache server at %s holds this worker's cache", url)
    try:
        cache.register_kv_caches(group.kv_caches, group.layout.kind)
    except SharingError as error:
        raise ConfigError(f"the KV cache cannot be lent to the cache server at {url}: {error}") from None
    return cache


def _of_rank(node: NodeSettings, rank: int, ranks: int) -> NodeSettings:
    """Returns the settings of a rank. Each rank gives the pool its part of the node's memory; if the parts
    are too small, the first rank gives all of it."""
    part = node.segment_size // ranks
    if part < MIN_SEGMENT:
        part = node.segment_size if rank == 0 else 0
    return msgspec.structs.replace(node, segment_size=part)


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """Lets threads that start in the `with` block run on all cores of the parent process. Then the calling
    thread has its own cores again.

    On CPUs, vLLM binds a worker's main thread to a single core, and new threads inherit that.
    """
    before = os.sched_getaffinity(0)
    # the parent may be gone, or its cores may be forbidden to this process; a thread on fewer cores is better
    # than none
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, before | os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
