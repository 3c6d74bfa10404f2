"""Which nodes of the file belong on this machine, on which ports, and whether the machine can carry them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pd_cache.config import (
    CacheServerNode,
    ClusterConfig,
    EtcdDiscovery,
    LocalTier,
    Node,
    Problem,
    Source,
    VllmEngineConfig,
)
from pd_cache.errors import ConfigError
from transfer.settings import rdma_devices

PORT_FIELDS = ("port", "metrics_port")


def is_local(host: str) -> bool:
    """Whether an address is one of this machine's: whether it can be bound."""
    try:
        with _socket_at(host, 0):
            return True
    except (OSError, UnicodeError):
        return False


def local_nodes(config: ClusterConfig) -> list[Node]:
    """The nodes that run on this machine."""
    local = {host: is_local(host) for host in {node.host for node in config.nodes}}
    return [node for node in config.nodes if local[node.host]]


def free_port(host: str) -> int:
    """Returns a port of `host` that was free a moment ago."""
    with _socket_at(host, 0) as bound:
        return int(bound.getsockname()[1])


def choose_ports(config: ClusterConfig, nodes: Iterable[Node] | None = None) -> ClusterConfig:
    """Returns the same cluster with a free port wherever one of `nodes`, by default all of this machine, has port 0."""
    mine = {node.name for node in (local_nodes(config) if nodes is None else nodes)}
    with contextlib.ExitStack() as stack:
        nodes = []
        for node in config.nodes:
            chosen = {}
            for field in PORT_FIELDS:
                if node.name in mine and getattr(node, field, None) == 0:
                    # kept until all are chosen, so that no two nodes get the same one
                    holder = stack.enter_context(_socket_at(node.host, 0))
                    chosen[field] = holder.getsockname()[1]
            nodes.append(msgspec.structs.replace(node, **chosen))
        return msgspec.structs.replace(config, nodes=tuple(nodes))


def choose_sockets(config: ClusterConfig) -> ClusterConfig:
    """Returns the same cluster with the address of each cache server written out: processes with another environment would choose
    another folder."""
    nodes = (
        msgspec.structs.replace(node, url=config.server_url(node)) if isinstance(node, CacheServerNode) else node
        for node in config.nodes
    )
    return msgspec.structs.replace(config, nodes=tuple(nodes))


def pick_node(config: ClusterConfig, role: str, name: str | None) -> Node:
    """Returns the node to launch: the one named, or the only one of the role on this machine. Raises ConfigError otherwise."""
    candidates = [node for node in config.nodes if node.role == role]
    if name is not None:
        for node in candidates:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in candidates) or "none"
        raise ConfigError(f"--node {name}: no {role} node of that name in the file; there are: {known}")
    local = [node for node in local_nodes(config) if node.role == role]
    if len(local) == 1:
        return local[0]
    if not candidates:
        raise ConfigError(f"the file has no node of the role {role}; roles there: {', '.join(_roles(config.nodes))}")
    names = ", ".join(node.name for node in local) or "none"
    raise ConfigError(f"{len(local)} {role} nodes belong on this machine ({names}); say which with --node NAME")


def machine_problems(config: ClusterConfig, nodes: Iterable[Node]) -> Iterator[Problem]:
    """Returns why this machine cannot run `nodes`, the most basic problems first: devices, memory, ports."""
    chosen = {node.name for node in nodes}
    yield from _device_problems(config)
    memory = machine_memory()
    total = 0
    for index, node in enumerate(config.nodes):
        if node.name not in chosen or node.role in ("master", "proxy"):
            continue
        own = getattr(node, "segment_size", None)
        size = config.segment_size(node)
        path = ("transfer", "segment_size") if own is None else ("nodes", index, "segment_size")
        total += size
        if size > memory:
            yield Problem(path, f"is more than this machine's memory of {_gib(memory)}")
        elif total > memory:
            yield Problem(
                path, f"with the other segments here makes {_gib(total)}, more than the memory of {_gib(memory)}"
            )
    yield from _model_problems(config, chosen)
    yield from _secret_problems(config, chosen)
    if config.transfer.staging_size > memory:
        yield Problem(("transfer", "staging_size"), f"is more than this machine's memory of {_gib(memory)}")
    for index, tier in enumerate(config.cache.tiers):
        if isinstance(tier, LocalTier) and tier.device == "cpu" and tier.capacity > memory:
            yield Problem(
                ("cache", "tiers", index, "capacity"), f"is more than this machine's memory of {_gib(memory)}"
            )
    for index, node in enumerate(config.nodes):
        if node.name in chosen:
            for field in PORT_FIELDS:
                port = getattr(node, field, 0)
                if port and not is_bindable(node.host, port):
                    yield Problem(
                        ("nodes", index, field),
                        f"is taken on {node.host} by another process; choose another port, or 0 for any free one",
                    )


def machine_memory() -> int:
    """Returns how many bytes of memory this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_machine(config: ClusterConfig, source: Source, nodes: Iterable[Node]) -> None:
    """Raises ConfigError for the first problem of `machine_problems`."""
    for problem in machine_problems(config, nodes):
        raise source.error(problem)


def unresolved_port(config: ClusterConfig, node: Node) -> Problem | None:
    """Finds ports 0 with which `launch` cannot work: other processes have to know the port, and only the file tells them."""
    registered = isinstance(config.discovery, EtcdDiscovery)
    for index, other in enumerate(config.nodes):
        needed = (
            (other.role == "master" and not registered)
            or (node.role == "proxy" and other.role in ("prefill", "decode") and not registered)
            or (_shares_memory(config, node) and other.role == "store" and other.host == node.host)
        )
        if needed and getattr(other, "port", None) == 0 and other.name != node.name:
            return Problem(
                ("nodes", index, "port"),
                f"a {node.role} node has to know this port: write one, or let `pd-cache up` choose for all nodes",
            )
    return None


def _shares_memory(config: ClusterConfig, node: Node) -> bool:
    """Whether the node's process has to know the address of its host's `mooncake_client` from the file."""
    transfer = config.transfer
    return transfer.client == "host" and not transfer.client_address and node in config.caching_nodes()


def _model_problems(config: ClusterConfig, chosen: set[str]) -> Iterator[Problem]:
    engine = config.engine
    serving = any(node.name in chosen for node in (*config.by_role("prefill"), *config.by_role("decode")))
    if engine is None or not serving:
        return
    where: tuple[str, ...]
    if isinstance(engine, VllmEngineConfig):
        path, where = engine.model if engine.model.startswith(("/", ".")) else None, ("engine", "model")
    else:
        path, where = engine.model.path, ("engine", "model", "path")
        if importlib.util.find_spec("transformers") is None:
            yield Problem(
                ("engine", "kind"), "needs the package transformers; `pip install 'pd-cache[reference]'` brings it"
            )
    if path is not None and not (Path(path) / "config.json").is_file():
        yield Problem(where, "is no Hugging Face model folder on this machine: it has no config.json")


def _secret_problems(config: ClusterConfig, chosen: set[str]) -> Iterator[Problem]:
    """Finds files of keys, passwords and certificates that this machine's processes could not read."""
    files: dict[tuple[str | int, ...], str | None] = {}
    if any(node.name in chosen for node in config.by_role("proxy")):
        files["proxy", "api_keys_file"] = config.proxy.api_keys_file
        files["proxy", "monitor_keys_file"] = config.proxy.monitor_keys_file
        files["proxy", "node_key_file"] = config.proxy.node_key_file
        if (own := config.proxy.tls) is not None:
            files |= {("proxy", "tls", name): getattr(own, name) for name in own.__struct_fields__}
    if chosen and isinstance(config.discovery, EtcdDiscovery):
        files["discovery", "password_file"] = config.discovery.password_file
        if (tls := config.discovery.tls) is not None:
            files |= {("discovery", "tls", name): getattr(tls, name) for name in tls.__struct_fields__}
    for path, file in files.items():
        if file is not None and not os.access(file, os.R_OK):
            yield Problem(path, "cannot be read on this machine, or is not there")


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
            yield Problem(("transfer", "devices", index), f"is no RDMA device of this machine; there are: {there}")


def is_bindable(host: str, port: int) -> bool:
    """Whether an address is one of this machine's, and nothing listens at it."""
    try:
        with _socket_at(host, port):
            return True
    except OSError:
        return False


def _socket_at(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the address. Raises OSError or UnicodeError if that is impossible. IPv4, as Mooncake's addresses are."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}GiB"


def _roles(nodes: Iterable[Node]) -> list[str]:
    return sorted({node.role for node in nodes})
