"""Which addresses of a cluster this machine can connect to: those that the file and discovery name, and segments on the same hosts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator

import msgspec

from launch.discovery import View
from launch.masters import Segment
from pd_cache.cluster import ClusterConfig, EtcdDiscovery, NodeRecord
from pd_cache.cluster.machine import host_of, port_of

CONNECT_S = 1.0
_AT_A_TIME = 32


class PeerAddress(msgspec.Struct, frozen=True):
    """One address to connect to."""

    peer: str
    """The node's name; for anything that is not a node of ours, a description."""
    what: str
    """`service`, `metrics`, `segment`, `metadata`, `discovery`."""
    address: str
    """`host:port`."""


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


async def reach(targets: list[PeerAddress]) -> dict[PeerAddress, str]:
    """Tries to connect to each, some at a time; sends nothing. Returns why there is no connection, or an empty string if it was made."""
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(target: PeerAddress) -> str:
        host, port = host_of(target.address), port_of(target.address)
        async with places:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_S)
            except TimeoutError:
                return f"no answer within {CONNECT_S:g} s"
            except (OSError, ValueError) as error:  # ValueError: not a valid name
                number = getattr(error, "errno", None)
                return os.strerror(number) if number and number > 0 else str(error) or repr(error)
            writer.close()
            return ""

    return dict(zip(targets, await asyncio.gather(*map(one, targets)), strict=True))
