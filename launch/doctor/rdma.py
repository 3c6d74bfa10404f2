"""RDMA devices: whether they are there, their links, their GIDs, and whether they reach a GPU's memory."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from launch.doctor.finding import Finding, broken, ok, skipped, warning
from transfer.settings import TransferSettings, rdma_devices

_WHY = "transfer.protocol is rdma; Mooncake would silently run over TCP"
_DMABUF_KERNEL = (5, 12)
_TCP = "needed only with transfer.protocol: rdma"


def rdma_findings(transfer: TransferSettings | None, root: Path = Path("/")) -> Iterator[Finding]:
    """Looks at the devices of the machine whose `/sys`, `/proc` and `/dev` are below `root`.

    `transfer`: of the cluster's file; None where there is none.
    """
    needed = transfer is not None and transfer.protocol == "rdma"
    sysfs = root / "sys/class/infiniband"
    present = rdma_devices(sysfs)
    chosen = transfer.devices if transfer is not None and transfer.devices else present
    if not present:
        if needed:
            yield broken(
                "rdma.devices", f"this machine has no RDMA device ({sysfs} is empty)", why=_WHY,
                repair="load the NIC's driver, e.g. modprobe mlx5_ib; in a container: pass the devices in; or transfer.protocol: tcp",
            )  # fmt: skip
        else:
            yield skipped("rdma.devices", f"this machine has none; {_TCP}")
        return
    for name in chosen:
        if name not in present:
            yield broken(
                "rdma.devices", f"is no device of this machine, which has {', '.join(present)}", name, why=_WHY,
                repair="transfer.devices: name devices that this machine has, or [] for Mooncake's choice",
            )  # fmt: skip
        else:
            yield ok("rdma.devices", "is there", name)
            for port in sorted((sysfs / name / "ports").glob("*")):
                yield _link_finding(port, f"{name}/{port.name}", needed)
                yield _gid_finding(port, f"{name}/{port.name}", needed)
    yield _verbs_finding(root, needed)
    yield from gpu_findings(root, needed)


def _link_finding(port: Path, about: str, needed: bool) -> Finding:
    check = "rdma.link"
    state, physical = _last(port / "state"), _last(port / "phys_state")
    layer, rate = _read(port / "link_layer"), _read(port / "rate")
    found = f"{state or 'state unknown'} ({physical or 'link unknown'}), {layer}, {rate}"
    if state == "ACTIVE":
        return ok(check, found, about)
    repair = {
        "INIT": "start a subnet manager for the fabric: systemctl start opensm",
        "DOWN": f"ibstat {about.partition('/')[0]}; plug in the cable, or ip link set DEV up",
    }.get(state, "ibstat; see the driver's messages in dmesg")
    make = broken if needed else warning
    return make(check, found, about, why="a port that is not ACTIVE carries nothing", repair=repair)


def _gid_finding(port: Path, about: str, needed: bool) -> Finding:
    check = "rdma.gids"
    gids = {}
    for file in sorted((port / "gids").glob("*"), key=lambda file: int(file.name)):
        gid = _read(file)
        if gid and int(gid.replace(":", ""), 16) & (1 << 64) - 1:
            gids[int(file.name)] = gid
    kinds = {index: _read(port / "gid_attrs" / "types" / str(index)) for index in gids}
    make = broken if needed else warning
    if not gids:
        return make(
            check, "the port has no GID", about, why="peers address a port by its GID",
            repair="ip addr add ADDRESS/PREFIX dev DEV   # RoCE makes its GIDs from the interface's addresses",
        )  # fmt: skip
    if _read(port / "link_layer") != "Ethernet":
        return ok(check, f"{len(gids)} GIDs", about)
    routable = [index for index, kind in kinds.items() if "v2" in kind and _ipv4(gids[index])]
    if not routable:
        return make(
            check, f"{len(gids)} GIDs, none of them RoCE v2 with an IPv4 address", about,
            why="RoCE v1 and link-local GIDs do not cross routers, and peers may choose another kind",
            repair="ip addr add ADDRESS/PREFIX dev DEV; then show_gids",
        )  # fmt: skip
    shown = ", ".join(f"{index} ({_ipv4(gids[index])})" for index in routable)
    return ok(check, f"{len(gids)} GIDs; RoCE v2 over IPv4 at index {shown}", about)


def _verbs_finding(root: Path, needed: bool) -> Finding:
    check = "rdma.verbs"
    nodes = sorted((root / "dev/infiniband").glob("uverbs*"))
    if nodes:
        return ok(check, ", ".join(f"/dev/infiniband/{node.name}" for node in nodes))
    make = broken if needed else warning
    return make(
        check, "/dev/infiniband has no uverbs device", why="libibverbs opens the NIC through it",
        repair="modprobe ib_uverbs; in a container: docker run --device=/dev/infiniband --cap-add=IPC_LOCK",
    )  # fmt: skip


def gpu_findings(root: Path, needed: bool) -> Iterator[Finding]:
    """Returns whether the NIC can read and write a GPU's memory; nothing where there is no NVIDIA GPU."""
    driver = _read(root / "proc/driver/nvidia/version")
    if not driver:
        return
    check = "rdma.gpu"
    if (root / "sys/module/nvidia_peermem").exists() or (root / "sys/module/nv_peer_mem").exists():
        yield ok(check, "nvidia_peermem is loaded")
        return
    release = _read(root / "proc/sys/kernel/osrelease")
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if "Open Kernel Module" in driver and version >= _DMABUF_KERNEL:
        yield ok(check, f"DMA-BUF: NVIDIA's open kernel module on Linux {release}")
        return
    if not needed:
        yield skipped(check, f"neither nvidia_peermem nor DMA-BUF; {_TCP}")
        return
    yield warning(
        check, f"neither nvidia_peermem nor DMA-BUF (Linux {release}, driver without open kernel modules)",
        why="the NIC cannot reach a GPU's memory; pd-cache stages in the host's, but Mooncake's other users may not",
        repair="modprobe nvidia_peermem   # or install NVIDIA's open kernel modules on Linux 5.12 or later",
    )  # fmt: skip


def _ipv4(gid: str) -> str:
    """Returns the IPv4 address in a GID; empty where there is none."""
    mapped = ipaddress.IPv6Address(gid).ipv4_mapped
    return str(mapped) if mapped is not None else ""


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeError):
        return ""


def _last(file: Path) -> str:
    """Returns the word of `4: ACTIVE`."""
    return _read(file).rpartition(":")[2].strip()
