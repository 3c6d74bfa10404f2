"""Which addresses of a cluster this machine can connect to. `pd-cache doctor` checks it here, and asks nodes by their `/peers`.

A node that connected to any address given in a request would be a port scanner for anyone who can reach it. So requests name no
addresses. A node tries the addresses that its own file or discovery names, and, of the segments in the master's list, those on the same
hosts. The result is kept for a second, and only one round at a time is under way, however many requests come.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from launch.discovery import View, open_directory
from launch.masters import Segment, segments_at
from pd_cache.cluster import ClusterConfig, EtcdDiscovery, NodeRecord
from pd_cache.cluster.machine import host_of, port_of

CONNECT_S = 1.0
MAX_TARGETS = 256
"""The most addresses that one round tries; further ones are left out, and counted."""
_AT_A_TIME = 32
_FRESH_S = 1.0
"""Short, so that the next request after a repair shows its effect."""
_SYNC_S = 2.0


class PeerAddress(msgspec.Struct, frozen=True):
    """One address to connect to."""

    peer: str
    """The node's name; for anything that is not a node of ours, a description."""
    what: str
    """`service`, `metrics`, `segment`, `metadata`, `discovery`."""
    address: str
    """`host:port`."""


class Reach(msgspec.Struct, frozen=True):
    """The outcome of connecting to a target."""

    target: PeerAddress
    error: str = ""
    """Why there is no connection; empty if it was made."""

    @property
    def ok(self) -> bool:
        return not self.error


class PeerReport(msgspec.Struct, frozen=True):
    """A node's answer to `/peers`."""

    node: str
    reached: list[Reach]
    left_out: int = 0


def targets_of(
    config: ClusterConfig, view: View, segments: Iterable[Segment] = (), leader: str | None = None
) -> list[PeerAddress]:
    """Returns everything that a node of this cluster may have to connect to over TCP.

    `leader`: the name of the leading master, if one of several is elected; the others take no calls.
    """
    found = [
        target
        for record in view.nodes
        for target in _targets_of_node(record)
        if target.what != "service" or record.role != "master" or not config.masters.ha or record.name == leader
    ]
    hosts = {host_of(record.address) for record in view.nodes} | {node.host for node in config.nodes}
    found += [
        PeerAddress(segment.segment_name, "segment", segment.te_endpoint)
        for segment in segments
        if host_of(segment.te_endpoint) in hosts and port_of(segment.te_endpoint)
    ]
    metadata = config.transfer.metadata
    if "://" in metadata:
        port = port_of(metadata) or (443 if metadata.startswith("https") else 80)
        found.append(PeerAddress("metadata server", "metadata", f"{host_of(metadata)}:{port}"))
    if isinstance(config.discovery, EtcdDiscovery):
        found += [PeerAddress("etcd", "discovery", endpoint) for endpoint in config.discovery.endpoints]
    return list(dict.fromkeys(found))


def _targets_of_node(record: NodeRecord) -> Iterator[PeerAddress]:
    places = [("metrics", record.metrics)]
    # a store's address is the name of its segment, at which nothing listens; the master reports the real one
    if record.role != "store" and not record.address.startswith("ipc://"):
        places.insert(0, ("service", record.address))
    for what, address in places:
        if address and host_of(address) and port_of(address):
            yield PeerAddress(record.name, what, f"{host_of(address)}:{port_of(address)}")


async def reach(targets: Iterable[PeerAddress]) -> list[Reach]:
    """Tries to connect to each, some at a time; sends nothing."""
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(target: PeerAddress) -> Reach:
        host, port = host_of(target.address), port_of(target.address)
        async with places:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_S)
            except TimeoutError:
                return Reach(target, f"no answer within {CONNECT_S:g} s")
            except (OSError, ValueError) as error:  # ValueError: not a valid name
                number = getattr(error, "errno", None)
                return Reach(target, os.strerror(number) if number and number > 0 else str(error))
            writer.close()
            return Reach(target)

    return list(await asyncio.gather(*(one(target) for target in targets)))


class PeerChecks:
    """Answers a node's `/peers`. For one event loop."""

    def __init__(self, config: ClusterConfig, node: str) -> None:
        """`node`: our own name, which is not tried."""
        self._config = config
        self._node = node
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._looked_at = float("-inf")

    async def answer(self) -> dict[str, Any]:
        """Returns a `PeerReport` of what this node reaches, as plain values. Uses the last second's round, the one under way, or a new one."""
        if self._task is None or (self._task.done() and time.monotonic() - self._looked_at > _FRESH_S):
            self._task = asyncio.create_task(self._look())
        return await asyncio.shield(self._task)

    async def _look(self) -> dict[str, Any]:
        try:
            targets = [target for target in await asyncio.to_thread(self._targets) if target.peer != self._node]
            reached, left_out = await reach(targets[:MAX_TARGETS]), max(0, len(targets) - MAX_TARGETS)
            return dict(msgspec.to_builtins(PeerReport(self._node, reached, left_out)))
        finally:
            self._looked_at = time.monotonic()

    def _targets(self) -> list[PeerAddress]:
        with open_directory(self._config) as directory:
            directory.wait_synced(_SYNC_S)
            view = directory.view()
        segments: list[Segment] = []
        for record in view.by_role("master"):
            if record.metrics is not None and not segments:
                try:
                    segments = segments_at(record.metrics)
                except (OSError, ValueError):
                    continue  # the connection to it is tried, too, and shows that
        return targets_of(self._config, view, segments)
