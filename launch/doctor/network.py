"""Ports of this machine, and which nodes can connect to which."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from launch.access import NOBODY, Access
from launch.asking import fetch
from launch.doctor.finding import Finding, broken, ok, skipped
from launch.masters import Segment
from launch.reachability import PeerAddress, PeerReport, Reach, reach, read_peers
from launch.status import NodeStatus
from pd_cache.cluster import Node
from pd_cache.cluster.addresses import host_of, is_bindable, ports_of

_SHOWN = 4
_PEERS_S = 15.0
"""A node tries the addresses that it knows before it answers: at most eight seconds of connections, after it has asked discovery."""
_WHY_HERE = "what this machine cannot reach, its engines cannot load from or store to"
_WHY_THERE = "a node that cannot reach another computes again what that one has, and its stores fail"
MOONCAKE_PORTS = "Mooncake's clients listen on ports of 15000 to 17000, or of MC_MIN_RPC_PORT to MC_MAX_RPC_PORT"


def port_findings(nodes: Iterable[Node], in_use: Collection[str]) -> Iterator[Finding]:
    """Returns whether the ports of `nodes`, those of this machine, are free or `in_use` (addresses, `host:port`) by our own."""
    check = "network.port"
    for node in nodes:
        for field, port in ports_of(node):
            address = f"{node.host}:{port}"
            if address in in_use:
                yield ok(check, f"{address} is held by the node itself", node.name)
            elif is_bindable(node.host, port):
                yield ok(check, f"{address} is free", node.name)
            else:
                yield broken(
                    check, f"{address} is taken, and what holds it does not answer as {node.name} would", node.name,
                    why="the node cannot start, or it hangs",
                    repair=f"ss -ltnp 'sport = :{port}'   # end that process, or choose another {field} in the file",
                )  # fmt: skip


def reach_findings(reached: Sequence[Reach]) -> Iterator[Finding]:
    """Judges the outcome of connections from here."""
    check = "network.from_here"
    good = [one for one in reached if one.ok]
    if good:
        peers = len({one.target.peer for one in good})
        yield ok(check, f"{len(good)} addresses of {peers} nodes, segments and services take connections")
    for one in reached:
        if not one.ok:
            found = f"{one.target.what} at {one.target.address}: {one.error}"
            yield broken(check, found, one.target.peer, why=_WHY_HERE, repair=_open(one.target))


def reach_from_here(targets: Iterable[PeerAddress]) -> list[Reach]:
    """Connects to each target."""
    return asyncio.run(reach(targets))


def peer_report(row: NodeStatus, access: Access = NOBODY) -> PeerReport | None:
    """Returns what a node says it reaches; None if it says nothing, like vLLM and masters. `access`: key and certificates for proxies."""
    if (
        not row.asked
        or row.silent
        or row.record.role not in ("prefill", "decode", "proxy")
        or not row.record.address.startswith("http")
    ):
        return None
    try:
        needed = access if row.record.role == "proxy" else NOBODY
        return read_peers(fetch(f"{row.record.address}/peers", _PEERS_S, needed))
    except (OSError, ValueError):
        return None


def peer_findings(
    rows: Iterable[NodeStatus], reports: Mapping[str, PeerReport], reached: Iterable[Reach], here: Collection[str]
) -> Iterator[Finding]:
    """Judges which nodes reach each other and this machine.

    `reports`: by the name of the node. `reached`: from here, so that a dead address is reported once. `here`: this machine's hosts.
    """
    check = "network.from_nodes"
    dead = {one.target for one in reached if not one.ok}
    silent: dict[str, list[str]] = defaultdict(list)
    spoken = set(here)
    for row in rows:
        report = reports.get(row.name)
        host = row.host
        if report is None:
            if host:
                silent[host].append(row.name)
            continue
        spoken.add(host)
        failed = [one for one in report.reached if not one.ok and one.target not in dead]
        if not failed:
            count = sum(one.ok for one in report.reached)
            beyond = f", {report.left_out} were not tried" if report.left_out else ""
            yield ok(check, f"reaches {count} addresses of the others{beyond}", row.name)
            continue
        shown = "; ".join(f"{_named(one.target)}: {one.error}" for one in failed[:_SHOWN])
        more = f"; and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
        yield broken(
            check, f"does not reach what this machine does: {shown}{more}", row.name, why=_WHY_THERE,
            repair=f"{_open(failed[0].target)}; look for routes and firewalls between it and {host}",
        )  # fmt: skip
    mute = [f"{host} ({', '.join(sorted(names))})" for host, names in sorted(silent.items()) if host not in spoken]
    if mute:
        shown = ", ".join(mute)
        yield skipped(check, f"no node tells what is reached from {shown}", repair="on each: pd-cache doctor -c FILE")


def advertised_findings(hosts: Collection[str], segments: Iterable[Segment]) -> Iterator[Finding]:
    """Finds segments that only their own host can reach, in a cluster of several `hosts`."""
    if len({host for host in hosts if not _only_here(host)}) < 2:
        return
    for segment in segments:
        told = [address for address in (segment.segment_name, segment.te_endpoint) if _only_here(host_of(address))]
        if told:
            yield broken(
                "network.advertised", f"is given out as {told[0]}, which other machines cannot reach", segment.segment_name,
                why="chunks that land there can only be read on its own machine",
                repair="nodes: the host of that node must be the address that the others reach it at",
            )  # fmt: skip


def _only_here(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _named(target: PeerAddress) -> str:
    return (
        f"{target.what} of {target.peer} at {target.address}"
        if target.what != "segment"
        else f"segment {target.peer} at {target.address}"
    )


def _open(target: PeerAddress) -> str:
    host, _, port = target.address.rpartition(":")
    if target.what == "segment":
        return f"let {port}/tcp through the firewall of {host}; {MOONCAKE_PORTS}"
    return f"on {host}: is {target.peer} running? ss -ltn 'sport = :{port}'; else let {port}/tcp through its firewall"
