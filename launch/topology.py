"""Which node a process runs, and on which ports: chooses what the file leaves open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from pd_cache.cluster import CacheServerNode, ClusterConfig, EtcdDiscovery, MasterNode, Node, Problem
from pd_cache.cluster.machine import PORT_FIELDS, bound_socket, local_nodes
from pd_cache.errors import ConfigError


def choose_ports(config: ClusterConfig, nodes: Iterable[Node] | None = None) -> ClusterConfig:
    """Returns the same cluster with a free port wherever one of `nodes` (by default, all of this machine) has port 0."""
    mine = {node.name for node in (local_nodes(config) if nodes is None else nodes)}
    with contextlib.ExitStack() as stack:
        nodes = []
        for node in config.nodes:
            chosen = {}
            for field in PORT_FIELDS:
                port = getattr(node, field, None)
                if field == "versions_port" and isinstance(node, MasterNode):
                    port = node.versions
                if node.name in mine and port == 0:
                    # kept until all are chosen, so that no two nodes get the same port
                    holder = stack.enter_context(bound_socket(node.host, 0))
                    chosen[field] = holder.getsockname()[1]
            nodes.append(msgspec.structs.replace(node, **chosen))
        return msgspec.structs.replace(config, nodes=tuple(nodes))


def choose_sockets(config: ClusterConfig) -> ClusterConfig:
    """Returns the same cluster with the address of each cache server written out: a process with another environment would choose another
    folder."""
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


def unresolved_port(config: ClusterConfig, node: Node) -> Problem | None:
    """Returns a problem if the node has a port 0 that `launch` cannot work with: other processes learn the port only from the file."""
    registered = isinstance(config.discovery, EtcdDiscovery)
    for index, other in enumerate(config.nodes):
        needed = (other.role == "master" and not registered) or (
            node.role == "proxy" and other.role in ("prefill", "decode") and not registered
        )
        if needed and getattr(other, "port", None) == 0 and other.name != node.name:
            return Problem(
                ("nodes", index, "port"),
                f"a {node.role} node has to know this port: write one, or let `pd-cache up` choose for all nodes",
            )
    return None


def _roles(nodes: Iterable[Node]) -> list[str]:
    return sorted({node.role for node in nodes})
