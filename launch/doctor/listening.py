"""Checks whether Mooncake's clients on this machine can be reached at addresses that the file does not name.

They listen on all addresses, whatever `host` says, and require no key; only a firewall can restrict that. To find out whether one does,
this connects from here to each other address of this machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from launch.doctor.finding import Finding, ok, skipped, warning
from launch.reachability import PeerAddress, Reach, reach
from pd_cache.cluster import Node

_CHECK = "network.listening"
_MOST_ADDRESSES, _MOST_PORTS = 16, 8
_LISTENS = "0A"
"""In /proc/net/tcp: the state LISTEN."""


def listening_findings(nodes: Iterable[Node], root: Path = Path("/")) -> Iterator[Finding]:
    """Checks where `nodes`, those of this machine, listen beyond their `host`."""
    ports = wide_ports(root)
    if not ports:
        yield skipped(_CHECK, "no Mooncake client runs here")
        return
    written = {address for node in nodes if (address := _resolved(node.host)) is not None}
    others = sorted(own_addresses(root) - written)[:_MOST_ADDRESSES]
    targets = [
        PeerAddress("mooncake", "segment", f"[{other}]:{port}" if ":" in other else f"{other}:{port}")
        for other in others
        for port in sorted(ports)[:_MOST_PORTS]
    ]
    yield verdict(asyncio.run(reach(targets)), written)


def verdict(reached: Iterable[Reach], written: Iterable[str]) -> Finding:
    """Judges the outcome of connections to the addresses that the file does not name."""
    taken = sorted({one.target.address.rpartition(":")[0] for one in reached if one.ok})
    if not taken:
        return ok(_CHECK, "Mooncake's ports can be reached at no address that the file does not name")
    first, last = _range()
    allowed = ", ".join(["127.0.0.0/8", *sorted(written)])
    return warning(
        _CHECK, f"Mooncake's clients also take connections at {', '.join(taken)}",
        why="they listen on all addresses, whatever host says, and ask for no key: who connects reads and writes the pool",
        repair=f"nft add rule inet filter input tcp dport {first}-{last} ip daddr != {{ {allowed} }} drop; nft add rule inet "
        f"filter input meta nfproto ipv6 tcp dport {first}-{last} drop",
    )  # fmt: skip


def wide_ports(root: Path = Path("/")) -> set[int]:
    """Returns the ports, in the range of Mooncake's clients, on which a process of this machine listens at all addresses."""
    first, last = _range()
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == _LISTENS and not int(address, 16) and first <= int(port, 16) <= last:
                found.add(int(port, 16))
    return found


def own_addresses(root: Path = Path("/")) -> set[str]:
    """Returns addresses of this machine at which other machines could reach it."""
    found: set[str] = set()
    before = ""
    for line in _lines(root / "proc/net/fib_trie"):
        if "/32 host LOCAL" in line:
            found.add(before)
        before = line.split()[-1] if line.split() else ""
    for line in _lines(root / "proc/net/if_inet6"):
        found.add(str(ipaddress.IPv6Address(int(line.split()[0], 16))))
    kept = (ipaddress.ip_address(address) for address in found)
    return {str(address) for address in kept if not address.is_loopback and not address.is_link_local}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _range() -> tuple[int, int]:
    """Returns the range from which Mooncake's clients choose their ports, by this environment; theirs may differ."""
    values = (os.environ.get("MC_MIN_RPC_PORT", ""), os.environ.get("MC_MAX_RPC_PORT", ""))
    first, last = (
        int(value) if value.isdigit() else usual for value, usual in zip(values, (15000, 17000), strict=True)
    )
    return first, last


def _resolved(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return None
