"""The work of each role in its process, one file per role. `run_role` is the only entry point.

Each role is a function of the file, its node, a callback for the moment at which the node can be used, and
the node's membership in the cluster. It returns when the process is asked to stop, and raises PdCacheError if
it cannot do its work.
"""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import Callable, Iterator

from launch.discovery import Member, find_master
from pd_cache.cluster import (
    CacheServerNode,
    ClusterConfig,
    MasterNode,
    Node,
    ProxyNode,
    StoreNode,
    VllmEngineConfig,
)

_MOST_FILES = 1 << 20
"""The most file descriptors that a node asks for. Some programs allocate memory for each descriptor that they
may have."""


def run_role(config: ClusterConfig, node: Node, ready: Callable[[str], None]) -> None:
    """Does the node's work in this process until SIGTERM or SIGINT. Raises PdCacheError if that fails.

    `ready` is called once, with the node's URL (or an empty string), as soon as the node can be used.
    """
    raise_limit_of_files()
    with Member(config, node) as member:

        def announce(url: str) -> None:
            if isinstance(node, StoreNode):  # nothing listens at the name of its segment
                ready("" if node.metrics_port is None else f"http://{node.host}:{node.metrics_port}")
            else:
                ready(url)
            member.announce(url)

        if isinstance(node, MasterNode):
            from launch.run.roles.master import run_master

            run_master(config, node, announce, member)
            return
        if isinstance(node, ProxyNode):
            with _imports():
                from launch.run.roles.proxy import run_proxy

            run_proxy(config, node, announce, on_stop=member.leave)
            return
        config = find_master(config, config.supervisor.ready_timeout_s)
        if isinstance(node, StoreNode) or node in config.caching_nodes():
            # other nodes leave the pool to their host's cache server
            member.master = config.master_address
        if isinstance(node, StoreNode):
            from launch.run.roles.store import run_store

            run_store(config, node, announce, member)
        elif isinstance(node, CacheServerNode):
            with _imports():
                from launch.run.roles.cache_server import run_cache_server

            run_cache_server(config, node, announce, member)
        elif isinstance(config.engine, VllmEngineConfig):
            from launch.run.roles.vllm import run_vllm

            run_vllm(config, node, announce, member)
        else:
            with _imports():
                from launch.run.roles.reference import run_reference_engine

            run_reference_engine(config, node, announce, member)


def raise_limit_of_files() -> None:
    """Raises the soft limit of open files to the hard one, or to a million; children inherit it. An answer
    through the proxy takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the kernel's own limit, fs.nr_open, may be lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _imports() -> Iterator[None]:
    """Imports without garbage collection: large modules such as torch make many lasting objects, and
    collecting among these takes a sixth of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
