"""Addresses: their parts, which of them belong to this machine, and which of its ports are free."""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Iterator

from pd_cache.cluster.schema import ClusterConfig, Node

PORT_FIELDS = ("port", "metrics_port", "versions_port")


def is_local(host: str) -> bool:
    """Returns whether an address belongs to this machine, that is, whether it can be bound."""
    return is_bindable(host, 0)


def local_nodes(config: ClusterConfig) -> list[Node]:
    """Returns the nodes that run on this machine."""
    local = {host: is_local(host) for host in {node.host for node in config.nodes}}
    return [node for node in config.nodes if local[node.host]]


def ports_of(node: Node) -> Iterator[tuple[str, int]]:
    """Yields the ports that the file gives a node, each with its key. Leaves out port 0, which is chosen later."""
    for field in PORT_FIELDS:
        if port := getattr(node, field, 0):
            yield field, port


def is_bindable(host: str, port: int) -> bool:
    """Returns whether an address belongs to this machine and nothing listens at it."""
    try:
        with bound_socket(host, port):
            return True
    except (OSError, UnicodeError):
        return False


def free_port(host: str) -> int:
    """Returns a port of `host` that was free a moment ago."""
    with bound_socket(host, 0) as bound:
        return int(bound.getsockname()[1])


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an IPv4 address, as Mooncake's are. Raises OSError or UnicodeError if that is impossible."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def host_of(address: str) -> str:
    """Returns the host of `host:port` or of a URL; empty if there is none."""
    try:
        return urllib.parse.urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:
        return ""


def port_of(address: str) -> int:
    """Returns the port of `host:port` or of a URL; 0 if there is none."""
    try:
        return urllib.parse.urlsplit(address if "://" in address else f"//{address}").port or 0
    except ValueError:
        return 0
