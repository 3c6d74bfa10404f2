"""The role `proxy`: the proxy as a process."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial

import uvloop

from launch.discovery import View, master_of, open_directory
from launch.masters import pool_bytes
from launch.proxy.app import Proxy
from launch.proxy.bodies import unmap_freed_bodies
from launch.proxy.gateway.envoy import serve_through_envoy
from launch.proxy.keys import ServerTls, WatchedFiles
from launch.proxy.lookups import PoolLookups, hash_seeds, open_lookup
from launch.proxy.routing.direct import DirectRule
from launch.run.supervise import stop_signals
from pd_cache.cluster import ClusterConfig, ProxyNode
from pd_cache.tracing import open_tracing

_SYNC_S = 2.0
"""How long a starting proxy waits for discovery; after that it uses the nodes of the file."""

_STREAM_TOKENS = {"auto": 2048, "always": 0, "never": None}
"""By `handoff.stream`: the fewest tokens to compute at the prefill node for which the decode node loads the
prompt meanwhile."""


def run_proxy(
    config: ClusterConfig,
    node: ProxyNode,
    ready: Callable[[str], None],
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Serves until asked to stop (`stop_signals`), then drains. Main thread only.

    Calls `ready` with the base URL once it accepts connections; port 0 takes a free one. Calls `on_stop` on
    a thread when the drain begins. Raises OSError if the address cannot be bound, ConfigError as `Proxy`,
    `ServerTls` and `open_directory` do, RoleError as `serve_through_envoy` does.
    """
    unmap_freed_bodies()
    timeout_s = config.transfer.timeouts.exist_ms / 1000 + 0.1
    tokens = config.proxy.direct_tokens
    tokens = config.cache.chunk_tokens if tokens is None else tokens
    lookups = PoolLookups(
        partial(open_lookup, config, node.host) if tokens else None,
        timeout_s=timeout_s,
        seeds=hash_seeds(config),
    )
    settings, files = config.proxy, WatchedFiles()
    tracing = open_tracing(config.tracing, node.role, node.name)
    tls = None if settings.tls is None else ServerTls(settings.tls, files).context
    proxy = Proxy(
        settings,
        DirectRule(tokens, _STREAM_TOKENS[config.handoff.stream]),
        lookups,
        cluster=config.name,
        master=partial(master_of, config),
        pool_bytes=partial(pool_bytes, config),
        files=files,
        tracing=tracing,
    )
    try:
        uvloop.run(_serve(config, proxy, tls, files, node, ready, on_stop))
    finally:
        tracing.close()


async def _serve(
    config: ClusterConfig,
    proxy: Proxy,
    tls: ssl.SSLContext | None,
    files: WatchedFiles,
    node: ProxyNode,
    ready: Callable[[str], None],
    on_stop: Callable[[], None],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in stop_signals():
        loop.add_signal_handler(signum, stop.set)
    await proxy.setup()

    def follow(view: View) -> None:
        loop.call_soon_threadsafe(proxy.update, view)

    directory = open_directory(config, follow)
    try:
        await asyncio.to_thread(directory.wait_synced, _SYNC_S)
        await proxy.check_nodes()
        if node.picker_port is not None:
            await proxy.pick_for_gateways(f"{node.host}:{node.picker_port}", config.proxy.tls)
        if config.proxy.gateway is None:
            ready(await proxy.listen(node.host, node.port, tls))
            await stop.wait()
        else:
            serving = partial(ready, f"{'http' if tls is None else 'https'}://{node.host}:{node.port}")
            await serve_through_envoy(config, node, proxy, files, stop, serving)
        leaving = asyncio.create_task(asyncio.to_thread(on_stop))  # etcd may be slow; no client waits for it
    finally:
        await proxy.close()
        await asyncio.to_thread(directory.close)
    await leaving
