"""What each role does in its process: `run_role` is the one way in, for `launch`, for `up` and for the demo."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from launch.discovery import Member, find_master
from launch.errors import RoleError
from launch.foreign import ForeignProgram
from launch.process import spawn_child
from launch.reachability import MasterHealth, PeerChecks, fetch, read_master_health
from launch.signals import stop_on_signals
from pd_cache.config import (
    CacheServerNode,
    ClusterConfig,
    DecodeNode,
    EtcdDiscovery,
    MasterNode,
    Node,
    NodeSettings,
    PrefillNode,
    ProxyNode,
    ReferenceEngineConfig,
    StoreNode,
    VllmEngineConfig,
)
from pd_cache.errors import ConfigError
from pd_cache.wire.descriptors import raise_limit
from transfer.environment import host_environment, split_master
from transfer.errors import PoolUnavailableError
from transfer.host import WAITS_FOR

if TYPE_CHECKING:
    import torch

    from pd_cache.blocks import BlockCache
    from pd_cache.tokens import Namespace

log = logging.getLogger(__name__)

Ready = Callable[[str], None]
"""Is called once, with the node's URL (or an empty string), as soon as the node can be used."""


def run_role(config: ClusterConfig, node: Node, ready: Ready) -> None:
    """Do the node's work in this process until SIGTERM or SIGINT. Raises PdCacheError if that fails."""
    raise_limit()
    with Member(config, node) as member:

        def announce(url: str) -> None:
            ready(url)
            member.announce(url)

        if isinstance(node, MasterNode):
            run_master(config, node, announce, member)
        elif isinstance(node, ProxyNode):
            run_proxy_node(config, node, announce, member)
        else:
            config = find_master(config, config.supervisor.ready_timeout_s)
            if isinstance(node, StoreNode) or (
                config.transfer.client == "embedded" and node in config.caching_nodes()
            ):  # other nodes leave the pool to their host's cache server or `mooncake_client`
                member.master = config.master_address
            if isinstance(node, StoreNode):
                run_store(config, node, announce, member)
            elif isinstance(node, CacheServerNode):
                run_cache_server(config, node, announce, member)
            else:
                run_engine(config, node, announce, member)


def master_command(config: ClusterConfig, node: MasterNode) -> list[str]:
    """Mooncake's master, with every flag that a cache depends on. Raises RoleError if the wheel is not installed.

    If `transfer.metadata` is an http address on the master's own host, the master serves that, too.
    """
    server = urllib.parse.urlsplit(config.transfer.metadata)
    serves_metadata = server.scheme == "http" and server.hostname == node.host
    return [
        _mooncake("mooncake_master"),
        f"--rpc_address={node.host}",
        f"--rpc_port={node.port}",
        f"--metrics_host={node.host}",
        f"--metrics_port={node.metrics_port}",
        f"--default_kv_lease_ttl={node.lease_ttl_ms}",
        f"--client_ttl={node.client_ttl_s}",
        f"--put_start_discard_timeout_sec={node.put_discard_timeout_s}",
        f"--eviction_high_watermark_ratio={node.eviction_high_watermark}",
        f"--eviction_ratio={node.eviction_ratio}",
        "--enable_metric_reporting=false",  # a long log line every ten seconds; /metrics has it all
        *(
            (
                "--enable_http_metadata_server=true",
                f"--http_metadata_server_host={server.hostname}",
                f"--http_metadata_server_port={server.port or 80}",
            )
            if serves_metadata
            else ()
        ),
        *(
            (
                "--enable_ha=true",
                f"--etcd_endpoints={';'.join(config.discovery.endpoints)}",
                f"--cluster_id={config.name}",
                "--enable_oplog=true",  # without it, all keys are lost with the leader
            )
            if config.masters.ha and isinstance(config.discovery, EtcdDiscovery)
            else ()
        ),
        "--logtostderr",
    ]


def run_master(config: ClusterConfig, node: MasterNode, ready: Ready, member: Member) -> None:
    """Run Mooncake's master as a child that dies with this process. One of several is ready as leader or as standby.

    It is started anew if etcd has lost data of the election, because masters do not notice that by themselves.
    """
    command, settings = master_command(config, node), config.supervisor
    spawn = functools.partial(spawn_child, command, stdout=subprocess.DEVNULL)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        anew = stack.enter_context(_lost_election(config, node))
        master = stack.enter_context(ForeignProgram("mooncake_master", spawn, settings.stop_grace_s))
        try:
            master.run(
                stop,
                serving=lambda: _serving(node, config.masters.ha),
                ready=lambda: ready(f"{node.host}:{node.port}"),
                deadline=time.monotonic() + settings.ready_timeout_s,
                hint=lambda: f"are the ports {node.port} and {node.metrics_port} of {node.host} free?",
                anew=anew,
            )
        finally:
            member.leave()  # first, so that no process that starts now looks for it there


@contextlib.contextmanager
def _lost_election(config: ClusterConfig, node: MasterNode) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether a master has to be started anew; it is called again and again."""
    if not config.masters.ha or not isinstance(config.discovery, EtcdDiscovery):
        yield lambda: False
        return
    from launch.discovery.election import DISAGREES_S, ElectionWatch

    def leads() -> bool | None:
        health = _master_health(node)
        return None if health is None else health.role == "leader"

    with ElectionWatch(config.discovery, config.name, f"{node.host}:{node.port}", leads) as watch:

        def anew() -> bool:
            lost = watch.lost
            if lost:
                watch.begin_anew()
                log.warning(
                    "%s: for %g s it and etcd have differed on who leads; it is started anew", node.name, DISAGREES_S
                )
            return lost

        yield anew


def client_command(config: ClusterConfig, node: StoreNode) -> list[str]:
    """The `mooncake_client` of a host. Raises RoleError if the wheel is not installed.

    Its segment is named by the address at which it listens, so that the one follows from the other.
    """
    clients = sum(other.host == node.host for other in config.caching_nodes())
    # each can have its transfers under way in both directions, two control calls and a ping
    threads = node.threads or max(4, clients * (2 * config.transfer.threads + 3))
    master, _ = split_master(config.master_address)
    return [
        _mooncake("mooncake_client"),
        f"--host={node.host}:{node.port}",
        f"--port={node.port}",
        f"--master_server_address={master}",
        f"--metadata_server={config.transfer.metadata}",
        f"--protocol={config.transfer.protocol}",
        f"--device_names={','.join(config.transfer.devices)}",
        f"--global_segment_size={int(node.segment_size)}",
        f"--threads={threads}",
        "--logtostderr",
    ]


def run_store(config: ClusterConfig, node: StoreNode, ready: Ready, member: Member) -> None:
    """Give memory to the pool until asked to stop, then unmount it, so that no key points at a node that is gone."""
    if config.transfer.client == "host":
        _run_host_client(config, node, ready, member)
    else:
        _run_segment(config, node, ready, member)


def _run_host_client(config: ClusterConfig, node: StoreNode, ready: Ready, member: Member) -> None:
    """Run a host's `mooncake_client` as a child that ends with this process, and unmounts its segment as it ends."""
    _, election = split_master(config.master_address)
    settings = config.supervisor
    with stop_on_signals() as stop:
        deadline = time.monotonic() + settings.ready_timeout_s
        # without a master, mooncake_client aborts; only it finds out whether one of several leads
        while election is None and not _listening(config.master_address):
            if time.monotonic() > deadline:
                raise PoolUnavailableError(f"Mooncake master {config.master_address} not reachable")
            if stop.wait(0.2):
                return
        spawn = functools.partial(
            spawn_child,
            client_command(config, node),
            death_signal=signal.SIGTERM,
            blocked=WAITS_FOR,
            env=host_environment(config.transfer, election),
            stdout=subprocess.DEVNULL,
        )
        with ForeignProgram("mooncake_client", spawn, settings.stop_grace_s) as client:
            try:
                client.run(
                    stop,
                    serving=lambda: _listening(f"{node.host}:{node.port}"),
                    ready=lambda: ready(f"{node.host}:{node.port}"),
                    deadline=deadline,
                    hint=lambda: (
                        f"is the port {node.port} of {node.host} free, and is there memory for {node.segment_size}?"
                    ),
                    again=election is not None,  # it ends if no master leads yet
                )
            finally:
                member.leave()


def _run_segment(config: ClusterConfig, node: StoreNode, ready: Ready, member: Member) -> None:
    """Mount the segment from this process."""
    from transfer.store import MooncakeStore

    settings = NodeSettings.of(config, node)
    named = f"{settings.host}:{node.port}" if node.port else settings.host
    with (
        stop_on_signals() as stop,
        MooncakeStore(
            settings.transfer, master=settings.master, host=named, segment_size=settings.segment_size
        ) as store,
    ):
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
                member.leave()  # before Mooncake's close(), which holds the GIL for longer than a lease may last


def run_cache_server(config: ClusterConfig, node: CacheServerNode, ready: Ready, member: Member) -> None:
    """Serve the cache of this host's engines until asked to stop."""
    from prometheus_client import ProcessCollector, start_http_server

    from pd_cache.metrics import CacheMetrics
    from pd_cache.server.app import CacheServer

    # threads that copy and threads that answer share one interpreter: a lookup does not wait 5 ms for its turn
    sys.setswitchinterval(0.0005)
    metrics = CacheMetrics()
    ProcessCollector(registry=metrics.registry)
    with stop_on_signals() as stop:
        try:
            scraped, thread = start_http_server(node.metrics_port, node.host, metrics.registry)
        except OSError as error:
            raise RoleError(f"port {node.metrics_port} of {node.host}: {error.strerror}") from None
        try:
            server = CacheServer(
                NodeSettings.of(config, node),
                node,
                config.server_url(node),
                metrics=metrics,
                lease_s=config.lease_ttl_ms / 1000,
            )
            try:
                # a full collection stops every thread for 0.1 s, nearly all of it for objects that imports leave for good
                gc.collect()
                gc.freeze()
                ready(server.url)
                stop.wait()
            finally:
                member.leave()
                server.close()
        finally:
            scraped.shutdown()
            scraped.server_close()
            thread.join()


def run_engine(config: ClusterConfig, node: PrefillNode | DecodeNode, ready: Ready, member: Member) -> None:
    """Serve the model, with a cache engine over the pool, or over the host's cache server."""
    if isinstance(config.engine, VllmEngineConfig):
        from launch.engines.vllm import serve_vllm

        def serving(url: str, namespace: Namespace | None) -> None:
            member.namespace = namespace
            ready(url)

        serve_vllm(config, config.engine, node, serving, on_stop=member.leave)
    else:
        run_reference_engine(config, node, ready, member)


def run_reference_engine(config: ClusterConfig, node: PrefillNode | DecodeNode, ready: Ready, member: Member) -> None:
    """Serve with the engine that ships with pd-cache, in this process."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    from launch.engines.reference import serve
    from pd_cache.client.cache import ServerCache
    from pd_cache.client.identity import EngineIdentity
    from pd_cache.engine import CacheEngineBuilder
    from pd_cache.layout import KVLayout
    from pd_cache.metrics import CacheMetrics
    from pd_cache.tokens import CacheMetadata

    assert isinstance(config.engine, ReferenceEngineConfig)  # the file's checks make sure of it
    settings = NodeSettings.of(config, node)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)

    opened: list[BlockCache] = []

    def open_cache(metadata: CacheMetadata, layout: KVLayout, kv_caches: dict[str, torch.Tensor]) -> BlockCache:
        metrics = CacheMetrics(registry)
        server = config.node(node.cache_server) if node.cache_server else None
        cache: BlockCache
        if isinstance(server, CacheServerNode):
            identity = EngineIdentity.of(metadata, config.cache)
            cache = ServerCache(config.server_url(server), identity, metrics=metrics)
        else:
            try:
                cache = CacheEngineBuilder.get_or_create(node.name, settings, metadata, layout, metrics=metrics)
            except ValueError as error:  # the one thing that the file cannot know: how large a chunk of this model is
                raise ConfigError(f"transfer.staging_size: {settings.transfer.staging_size}: {error}") from None
        opened.append(cache)
        cache.register_kv_caches(kv_caches)
        member.namespace = metadata.namespace(config.cache)
        return cache

    def announce(address: str) -> None:
        ready(f"http://{address}")

    with stop_on_signals():  # also while the cache unmounts: a second signal must not leave its keys behind
        try:
            serve(
                config.engine,
                config.handoff,
                node.host,
                node.port,
                open_cache,
                announce,
                registry=registry,
                on_stop=member.leave,  # first, so that no proxy sends anything more
                about=member.about,
                peers=PeerChecks(config, node.name).answer,
            )
        finally:
            CacheEngineBuilder.destroy(node.name)
            for cache in opened:
                cache.close()


def run_proxy_node(config: ClusterConfig, node: ProxyNode, ready: Ready, member: Member) -> None:
    """Route requests to the prefill and decode nodes that discovery finds."""
    from launch.proxy import run_proxy

    run_proxy(config, node, ready, on_stop=member.leave)


def _serving(node: MasterNode, elected: bool) -> bool:
    health = _master_health(node)
    return health is not None and (health.service_ready or (elected and health.role == "standby"))


def _master_health(node: MasterNode) -> MasterHealth | None:
    """Returns what a master says about itself; None if it does not answer."""
    try:
        return read_master_health(fetch(f"http://{node.host}:{node.metrics_port}/health", timeout=1))
    except (OSError, ValueError):
        return None


def _listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


def _mooncake(program: str) -> str:
    """Returns the path of one of the wheel's programs. Raises RoleError if the wheel is not installed."""
    beside = Path(sys.executable).with_name(program)
    path = str(beside) if beside.exists() else shutil.which(program)
    if path is None:
        raise RoleError(f"{program} is not installed; install pd-cache with one of the extras cpu, cuda12, cuda13")
    return path
