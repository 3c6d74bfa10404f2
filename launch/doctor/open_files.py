"""File descriptors: whether this user's processes may open as many as the nodes of this machine need."""

from __future__ import annotations

from collections.abc import Iterable

from launch.descriptors import descriptors_for
from launch.doctor.finding import Finding, ok, warning
from pd_cache.cluster import ClusterConfig, Node
from pd_cache.wire.descriptors import descriptor_limits

_ANY_NODE = 4096
"""Enough for all other nodes: connections to every node, shared memory, files of a disk tier."""


def descriptor_finding(
    config: ClusterConfig | None, mine: Iterable[Node], limits: tuple[int, int] | None = None
) -> Finding:
    """Judges the limits of this process; services may have others. `mine`: the nodes of this machine; `limits`: soft and hard, looked
    up if None."""
    check = "limits.descriptors"
    soft, hard = descriptor_limits() if limits is None else limits
    needed, what = _ANY_NODE, "nodes"
    if config is not None and any(node.role == "proxy" for node in mine):
        proxy = descriptors_for(config.proxy.max_requests)
        if proxy > needed:
            needed, what = proxy, f"a proxy with max_requests {config.proxy.max_requests}"
    found = f"a process may open {hard} files (soft limit {soft}, which nodes raise)"
    if hard >= needed:
        return ok(check, found)
    return warning(
        check, f"{found}; {what} may need {needed}",
        why="a proxy takes no more requests at a time than fit, and answers 503 to others; other nodes fail to connect",
        repair="raise the hard limit: LimitNOFILE= of the systemd unit, nofile in /etc/security/limits.conf, or --ulimit nofile of docker",
    )  # fmt: skip
