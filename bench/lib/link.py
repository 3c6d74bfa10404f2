"""How fast the link of a machine is, as its kernel says."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from transfer.settings import TransferSettings, rdma_devices

_SIOCGIFADDR = 0x8915
_RATE = re.compile(r"([0-9.]+) Gb/sec")


class Link(NamedTuple):
    """What carries a machine's transfers."""

    what: str
    """In words, e.g. `eth0`."""
    gbit: float | None
    """Gbit/s in each direction; None if it is unknown (loopback, most virtual interfaces)."""


def link_of(host: str, transfer: TransferSettings, sysfs: Path = Path("/sys/class")) -> Link:
    """Returns the link by which this machine, at the address `host`, talks to the others."""
    if transfer.protocol == "rdma":
        devices = transfer.devices or rdma_devices(sysfs / "infiniband")
        rates = [_rdma_gbit(sysfs / "infiniband" / device) for device in devices]
        known = [rate for rate in rates if rate is not None]
        return Link(", ".join(devices), sum(known) if known and len(known) == len(rates) else None)
    interface = _interface_of(host)
    if interface is None:
        return Link(host, None)
    return Link(interface, _ethernet_gbit(sysfs / "net" / interface))


def _rdma_gbit(device: Path) -> float | None:
    """Returns the sum over the device's ports that are up."""
    total = 0.0
    for port in device.glob("ports/*"):
        try:
            if "ACTIVE" in (port / "state").read_text() and (match := _RATE.match((port / "rate").read_text())):
                total += float(match[1])
        except OSError:
            return None
    return total or None


def _ethernet_gbit(interface: Path) -> float | None:
    try:
        if not _physical(interface):
            return None  # the speed that it reports is made up
        speed = int((interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return speed / 1000 if speed > 0 else None


def _physical(interface: Path) -> bool:
    """Returns whether there is a device under it: directly, or under the interfaces that a bond, a VLAN or a bridge is made of."""
    if (interface / "device").exists():
        return True
    return any(_physical(interface.parent / lower.name.removeprefix("lower_")) for lower in interface.glob("lower_*"))


def _interface_of(host: str) -> str | None:
    """Returns the interface that has this address."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
