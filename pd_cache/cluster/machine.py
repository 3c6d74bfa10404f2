"""Checks whether this machine can run nodes of the file: its devices, memory, files and ports.

`config check`, `launch`, `up` and `doctor` all use these checks, so that none of them accepts what another refuses. Memory is compared
with limits only: free memory changes by the minute, and only `doctor` knows which nodes already have theirs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pd_cache.cluster.addresses import is_bindable, ports_of
from pd_cache.cluster.checks import Problem
from pd_cache.cluster.document import KeyPath
from pd_cache.cluster.memory import locked_limit, locked_shortage, machine_memory, needs, shortage
from pd_cache.cluster.reader import Source
from pd_cache.cluster.schema import ClusterConfig, EngineNode, EtcdDiscovery, Node, ProxyNode, VllmEngineConfig
from pd_cache.config import LocalTier
from transfer.settings import rdma_devices


def check_machine(config: ClusterConfig, source: Source, nodes: Iterable[Node]) -> None:
    """Raises ConfigError for the first problem of `machine_problems`."""
    for problem in machine_problems(config, nodes):
        raise source.error(problem)


def machine_problems(config: ClusterConfig, nodes: Iterable[Node], root: Path = Path("/")) -> Iterator[Problem]:
    """Yields why the machine cannot run `nodes`, the most basic problems first. Its `/proc` and `/sys` are below `root`."""
    mine = list(nodes)
    yield from _device_problems(config)
    yield from _memory_problems(config, mine, root)
    yield from file_problems(config, mine)
    yield from _port_problems(config, mine)


def _device_problems(config: ClusterConfig) -> Iterator[Problem]:
    if config.transfer.protocol != "rdma":
        return
    present = rdma_devices()
    there = ", ".join(present) or "none"
    if not present:
        yield Problem(
            ("transfer", "protocol"), "this machine has no RDMA device (/sys/class/infiniband is empty); use tcp"
        )
    for index, device in enumerate(config.transfer.devices):
        if device not in present:
            yield Problem(("transfer", "devices", index), f"is not an RDMA device of this machine; there are: {there}")


def _memory_problems(config: ClusterConfig, nodes: Sequence[Node], root: Path) -> Iterator[Problem]:
    wanted = needs(config, nodes)
    if lacking := shortage(wanted, machine_memory(root)):
        yield Problem(_largest_size(config, nodes), lacking)
    if config.transfer.protocol == "rdma" and (lacking := locked_shortage(wanted, locked_limit(), root)):
        yield Problem(("transfer", "protocol"), f"rdma locks memory: {lacking}; run `ulimit -l unlimited`, or use tcp")


def _largest_size(config: ClusterConfig, nodes: Sequence[Node]) -> KeyPath:
    """Returns the key of the largest size that `nodes` need: the first one to lower."""
    sizes: dict[KeyPath, int] = {}
    for node in nodes:
        own = getattr(node, "segment_size", None)
        path = ("transfer", "segment_size") if own is None else ("nodes", config.nodes.index(node), "segment_size")
        sizes[path] = config.segment_size(node)
        if node in config.caching_nodes():
            sizes["transfer", "staging_size"] = config.transfer.staging_size
            sizes |= {
                ("cache", "tiers", index, "capacity"): tier.capacity
                for index, tier in enumerate(config.cache.tiers)
                if isinstance(tier, LocalTier) and tier.device == "cpu"
            }
    return max(sizes, key=lambda path: sizes[path])


def file_problems(config: ClusterConfig, nodes: Sequence[Node]) -> Iterator[Problem]:
    """Yields the files and folders that the configuration names and that the processes of `nodes` cannot read on this machine."""
    yield from _model_problems(config, nodes)
    files: dict[KeyPath, str | None] = {}
    if any(isinstance(node, ProxyNode) for node in nodes):
        files["proxy", "api_keys_file"] = config.proxy.api_keys_file
        files["proxy", "monitor_keys_file"] = config.proxy.monitor_keys_file
        files["proxy", "node_key_file"] = config.proxy.node_key_file
        if (own := config.proxy.tls) is not None:
            files |= {("proxy", "tls", name): getattr(own, name) for name in own.__struct_fields__}
    if nodes and isinstance(config.discovery, EtcdDiscovery):
        files["discovery", "password_file"] = config.discovery.password_file
        if (tls := config.discovery.tls) is not None:
            files |= {("discovery", "tls", name): getattr(tls, name) for name in tls.__struct_fields__}
    for path, file in files.items():
        if file is not None and not os.access(file, os.R_OK):
            yield Problem(path, "does not exist on this machine, or cannot be read")


def _model_problems(config: ClusterConfig, nodes: Iterable[Node]) -> Iterator[Problem]:
    engine = config.engine
    if engine is None or not any(isinstance(node, EngineNode) for node in nodes):
        return
    where: KeyPath
    if isinstance(engine, VllmEngineConfig):
        path, where = engine.model if engine.model.startswith(("/", ".")) else None, ("engine", "model")
    else:
        path, where = engine.model.path, ("engine", "model", "path")
        if path is not None and importlib.util.find_spec("transformers") is None:
            yield Problem(
                ("engine", "model", "path"),
                "needs the package transformers; run `pip install 'pd-cache[reference]'`",
            )
    if path is not None and not (Path(path) / "config.json").is_file():
        yield Problem(where, "is not a Hugging Face model folder on this machine: it has no config.json")


def _port_problems(config: ClusterConfig, nodes: Iterable[Node]) -> Iterator[Problem]:
    for node in nodes:
        for field, port in ports_of(node):
            if not is_bindable(node.host, port):
                yield Problem(
                    ("nodes", config.nodes.index(node), field),
                    f"another process uses this port of {node.host}; choose another port, or 0 for any free one",
                )
